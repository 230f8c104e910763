// Warpgroups, and the places of what they hand to each other.
#pragma once

#include "native/entry.h"

namespace flash_dist {

constexpr int WARPGROUP = 128;
constexpr int WARPS_OF_GROUP = WARPGROUP / 32;

// Whether a block has the registers that its roles take, a loading warpgroup and `consumers` more:
// it has those of its launch, which are a multiple of 8 for each thread. A warp that asks for others
// waits for ever.
constexpr bool has_registers(int consumers, int of_loader, int of_consumer) {
  const int warpgroups = 1 + consumers;
  return of_loader + consumers * of_consumer <=
         warpgroups * registers_at_launch(warpgroups * WARPGROUP);
}

// What a loader that keeps `of_loader` leaves to each consumer where so many blocks share a
// multiprocessor: no instruction names more than 255 registers.
constexpr int registers_left(int consumers, int blocks, int of_loader) {
  const int warpgroups = 1 + consumers;
  const int all = warpgroups * registers_at_launch(blocks * warpgroups * WARPGROUP);
  const int each = (all - of_loader) / consumers / 8 * 8;
  return each < MOST_REGISTERS ? each : MOST_REGISTERS;
}

// The next stage of a ring of tiles, and the parity of the phase in which it is filled. One number,
// since it lives in registers for the whole of a kernel.
template <int STAGES>
struct Ring {
  static_assert((STAGES & (STAGES - 1)) == 0, "a power of two");
  unsigned passed = 0;

  __device__ __forceinline__ int stage() const { return passed % STAGES; }
  __device__ __forceinline__ int parity() const { return passed / STAGES % 2; }
  __device__ __forceinline__ void advance() { ++passed; }
};

}  // namespace flash_dist

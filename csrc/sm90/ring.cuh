// Warpgroups, their registers, and the ring of stages that they share.
#pragma once

#include "native/entry.h"

namespace flash_dist {

constexpr int WARPGROUP = 128;
constexpr int WARPS_OF_GROUP = WARPGROUP / 32;

// True if the block's registers at launch suffice for its roles: a loading warpgroup and
// `consumers` consumer warpgroups. of_loader, of_consumer: registers per thread, multiples of 8. A
// warp that requests too many waits forever.
constexpr bool has_registers(int consumers, int of_loader, int of_consumer) {
  const int warpgroups = 1 + consumers;
  return of_loader + consumers * of_consumer <=
         warpgroups * registers_at_launch(warpgroups * WARPGROUP);
}

// Returns the registers per thread of each consumer, a multiple of 8 and at most MOST_REGISTERS, if
// the loader keeps `of_loader` and `blocks` blocks share a multiprocessor.
constexpr int registers_left(int consumers, int blocks, int of_loader) {
  const int warpgroups = 1 + consumers;
  const int all = warpgroups * registers_at_launch(blocks * warpgroups * WARPGROUP);
  const int each = (all - of_loader) / consumers / 8 * 8;
  return each < MOST_REGISTERS ? each : MOST_REGISTERS;
}

// The next stage of a ring, and the parity of the phase that fills it. Both follow from `passed`,
// the number of stages passed so far, so a ring occupies only one register throughout the kernel.
template <int STAGES>
struct Ring {
  static_assert((STAGES & (STAGES - 1)) == 0, "a power of two");
  unsigned passed = 0;

  __device__ __forceinline__ int stage() const { return passed % STAGES; }
  __device__ __forceinline__ int parity() const { return passed / STAGES % 2; }
  __device__ __forceinline__ void advance() { ++passed; }
};

// Like Ring, for any number of stages, in two registers.
template <int STAGES>
struct SliceRing {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

}  // namespace flash_dist

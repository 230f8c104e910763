// Warpgroups, and the places of what they hand to each other.
#pragma once

namespace flash_dist {

constexpr int WARPGROUP = 128;
constexpr int WARPS_OF_GROUP = WARPGROUP / 32;

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

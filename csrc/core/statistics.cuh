// Copies the statistics of a stage's queries, lse and delta, to shared memory.
#pragma once

#include "ptx/copy.cuh"
#include "ptx/special.cuh"

namespace flash_dist {

// COUNT floats of lse and as many of delta into neighbouring arrays, 16 bytes per thread.
template <class Target, int COUNT>
struct StatCopy {
  uint4 staged;

  __device__ __forceinline__ void fetch(uint32_t smem, const float* lse, const float* delta) {
    const int i = fresh_thread() * 4;
    if (i >= 2 * COUNT) return;
    const float* src = i < COUNT ? lse + i : delta + (i - COUNT);
    if constexpr (Target::HAS_CP_ASYNC) {
      cp_async_16(smem + i * 4, src, true);
    } else {
      staged = load_global_16(src);
    }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (!Target::HAS_CP_ASYNC) {
      const int i = fresh_thread() * 4;
      if (i < 2 * COUNT) store_shared_16(smem + i * 4, staged);
    }
  }
};

}  // namespace flash_dist

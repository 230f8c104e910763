// Normalizers correct P for the rounding of lse: P = exp2(S * scale - lse) * normalizer.
//
// For scores in the hundreds, lse in fp32 is only exact to 2^-16, and so would P be. But a row of P
// sums to 1, and each block of the dQ kernel computes complete rows. It sums P; the difference of
// the sum from 1 is the rounding error of lse. The dK/dV kernel, whose blocks have only some keys
// of each row, runs later and reads the normalizers.
#pragma once

#include "core/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

// Normalizer of a row of P that sums to `sum`. If rounding does not explain the difference from 1,
// lse covers more keys than this call has (in ring attention, for example), and the normalizer is
// 1. `rounding` allows for three relative errors of at most 2^-24 each: of lse, of lse * log2(e),
// and of score * scale. Adding 16 to |lse| allows for errors of the sum.
__device__ __forceinline__ float normalizer(float sum, float lse_log2) {
  const float rounding = fminf(0x1p-22f * (fabsf(lse_log2) + 16.0f), 0.5f);
  return fabsf(sum - 1.0f) <= rounding ? 1.0f / sum : 1.0f;
}

// Copies the normalizers of a stage's queries to shared memory, 16 bytes per thread. The first
// `rows` normalizers exist. The others, which no dQ block has written, become 0: P is 0 there.
template <class Target, int COUNT>
struct NormalizerCopy {
  uint4 staged;

  __device__ __forceinline__ void fetch(uint32_t smem, const float* src, int rows) {
    const int i = fresh_thread() * 4;
    if (i >= COUNT) return;
    if constexpr (Target::HAS_CP_ASYNC) {
      cp_async_16(smem + i * 4, src + i, i < rows);
    } else {
      staged = i < rows ? load_global_16(src + i) : uint4{};
    }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (!Target::HAS_CP_ASYNC) {
      const int i = fresh_thread() * 4;
      if (i < COUNT) store_shared_16(smem + i * 4, staged);
    }
  }
};

}  // namespace flash_dist

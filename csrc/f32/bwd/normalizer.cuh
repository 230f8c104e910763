// Normalizers, which correct P for the rounding of lse: P = exp2(S * scale - lse) * normalizer.
//
// For scores in the hundreds, lse, an fp32 number, is exact to 2^-16 only, and so would P be. But a
// row of P sums to 1, and a block of dQ goes through whole rows: it sums P, and the difference from 1
// is the rounding of lse. The kernel of dK and dV, whose blocks see a few keys of each row, runs after
// it and reads the normalizers.
#pragma once

#include "core/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

// The normalizer of a row of P that sums to `sum`. A difference from 1 that rounding does not explain
// means that lse covers other keys, too (those of a whole ring, say): then the normalizer is 1. The
// errors of lse, of its product with log2(e) and of the scores' with the scale are each 2^-24 of it at
// most; 16 is for the errors of the sum.
__device__ __forceinline__ float normalizer(float sum, float lse_log2) {
  const float rounding = fminf(0x1p-22f * (fabsf(lse_log2) + 16.0f), 0.5f);
  return fabsf(sum - 1.0f) <= rounding ? 1.0f / sum : 1.0f;
}

// Copies the normalizers of a stage's queries to shared memory, 16 bytes per thread. `rows` of them
// exist; the others, which no block of dQ has written, become 0. P is 0 there anyway.
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

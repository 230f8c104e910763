// Sets masked scores of a warp to -inf.
#pragma once

#include "core/accumulator.cuh"
#include "core/mask.cuh"

namespace flash_dist {

// S: MT * 16 queries from row0 on and NT * 8 keys from key0 on, which are whole aligned words of 32
// keys, or a part of one.
template <int MT, int NT>
__device__ __forceinline__ void apply_mask(Accumulator<MT, NT>& s, const Mask& mask, int row0,
                                           int key0, int code) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int w = 0; w < (NT + 3) / 4; ++w) {
        const int key = key0 + w * 32;
        const uint32_t word = mask.word(row0 + m * 16 + h * 8 + lane / 4, key / 32 * 32, code) >>
                              (key % 32 + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < 4 && w * 4 + n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(word >> (n * 8 + e) & 1)) s.x[m][w * 4 + n][2 * h + e] = -INFINITY;
      }
}

// S^T: MT * 16 keys from key0 on, within one aligned word of 32, and NT * 8 queries from row0 on.
template <int MT, int NT>
__device__ __forceinline__ void apply_mask_transposed(Accumulator<MT, NT>& st, const Mask& mask,
                                                      int row0, int key0, int code) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t word = mask.word(row0 + n * 8 + (lane % 4) * 2 + e, key0 / 32 * 32, code) >>
                            (key0 % 32 + lane / 4);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (!(word >> (m * 16 + h * 8) & 1)) st.x[m][n][2 * h + e] = -INFINITY;
    }
}

}  // namespace flash_dist

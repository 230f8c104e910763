// Online softmax of latent keys: each tile of keys is multiplied with V, its first columns, before
// the next tile is read.
#pragma once

#include "core/accumulator.cuh"
#include "core/combine.cuh"
#include "core/softmax.cuh"

namespace flash_dist {

// S -> P = exp2(S * scale - top). top and sum: of the two rows of a lane over the keys so far, sum
// of the columns of the lane alone. keep: the factor that rescales O, and sum here.
template <int NT>
__device__ __forceinline__ void to_weights(Accumulator<1, NT>& s, float (&top)[2], float (&sum)[2],
                                           float (&keep)[2], float scale_log2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float greatest = -INFINITY;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      greatest = fmaxf(greatest, fmaxf(s.x[0][n][2 * h], s.x[0][n][2 * h + 1]));
    }
    const Combine combine(top[h], __fmul_rn(quad_max(greatest), scale_log2));
    const float offset = combine.top == -INFINITY ? 0.0f : combine.top;
    float own = 0.0f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s.x[0][n][2 * h + e];
        x = exp2_approx(fmaf(x, scale_log2, -offset));
        own += x;
      }
    top[h] = combine.top;
    sum[h] = __fmaf_rn(sum[h], combine.keep, own);
    keep[h] = combine.keep;
  }
}

template <int OT>
__device__ __forceinline__ void rescale(Accumulator<1, OT>& out, const float (&keep)[2]) {
  // Multiplying by 1 changes nothing, so the skip does not change a bit.
  if (!__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < OT; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) out.x[0][n][e] *= keep[e / 2];
}

}  // namespace flash_dist

// Combines partial softmaxes of different keys, in the same way for all kernels that read a cache.
//
// With s = score * scale * log2(e), the partial result of a row over some keys is top = max(s),
// sum = sum(2^(s - top)) and out = sum(2^(s - top) * v). Without keys: -inf, 0, 0.
#pragma once

#include "ptx/convert.cuh"

namespace flash_dist {

// Adds later keys to a sum or to an element of out. Masked keys change no bit except the sign of a
// zero, which finish_out() clears.
__device__ __forceinline__ float add_scaled(float earlier, float later, float keep, float add) {
  return __fmaf_rn(later, add, __fmul_rn(earlier, keep));
}

// The new maximum, and the factors of the earlier and the later partial result.
struct Combine {
  float top, keep, add;

  __device__ __forceinline__ Combine(float earlier, float later) : top(fmaxf(earlier, later)) {
    const float offset = top == -INFINITY ? 0.0f : top;  // avoids inf - inf
    keep = exp2_approx(__fsub_rn(earlier, offset));      // exactly 1 if `earlier` is the maximum
    add = exp2_approx(__fsub_rn(later, offset));
  }
  __device__ __forceinline__ float operator()(float earlier, float later) const {
    return add_scaled(earlier, later, keep, add);
  }
};

__device__ __forceinline__ float finish_inverse(float sum) {
  return sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum);
}
__device__ __forceinline__ float finish_out(float out, float inverse) {
  return __fmaf_rn(out, inverse, 0.0f);  // adding 0 turns -0 into +0
}
__device__ __forceinline__ float finish_lse(float top, float sum) {
  return sum == 0.0f ? -INFINITY : __fmaf_rn(top, LN_2, logf(sum));
}

}  // namespace flash_dist

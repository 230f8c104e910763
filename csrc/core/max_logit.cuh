// The largest score of a query head: one float in memory, which warps raise by atomic maxima in any
// order. NaN counts as larger than every number.
#pragma once

#include <cstdint>

#include "ptx/maximum.cuh"

namespace flash_dist {

// Returns the larger of two numbers; NaN if one is NaN.
template <class Target>
__device__ __forceinline__ float larger(float x, float y) {
  if constexpr (Target::NUMBER >= 80) return max_nan(x, y);
  return y > x || y != y ? y : x;
}

// Raises max_logit to the largest x of a warp's lanes, and returns that x. Read as integers, floats
// that are not negative keep their order. Negative ones have the opposite order and, read as
// unsigned integers, are larger than all others.
template <class Target>
__device__ __forceinline__ float raise_max_logit(float* max_logit, float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = larger<Target>(x, __shfl_xor_sync(0xffffffffu, x, i));
  if (threadIdx.x % 32 != 0) return x;
  if (x < 0.0f) {
    atomicMin(reinterpret_cast<unsigned*>(max_logit), __float_as_uint(x));
  } else {  // x + 0 is never -0; every NaN becomes the largest integer
    const int bits = x == x ? __float_as_int(x + 0.0f) : INT32_MAX;
    atomicMax(reinterpret_cast<int*>(max_logit), bits);
  }
  return x;
}

}  // namespace flash_dist

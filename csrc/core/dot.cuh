// Dot products of parts of rows. The registers have the elements in the same order as memory.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/elements.h"

namespace flash_dist {

// Returns sum + a . b. a and b have 32 bits each: one fp32 or two 16-bit elements.
template <class T>
__device__ __forceinline__ float add_products(uint32_t a, uint32_t b, float sum) {
  const float2 x = unpack<T>(a);
  const float2 y = unpack<T>(b);
  return fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
}
template <>
__device__ __forceinline__ float add_products<Fp32>(uint32_t a, uint32_t b, float sum) {
  return fmaf(__uint_as_float(a), __uint_as_float(b), sum);
}

// Returns sum + a . b. a and b have 16 bytes each.
template <class T>
__device__ __forceinline__ float add_products(const uint4& a, const uint4& b, float sum) {
  sum = add_products<T>(a.x, b.x, sum);
  sum = add_products<T>(a.y, b.y, sum);
  sum = add_products<T>(a.z, b.z, sum);
  return add_products<T>(a.w, b.w, sum);
}

}  // namespace flash_dist

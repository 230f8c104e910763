// Maxima of floats and of bf16 pairs, relaxed loads of floats, and a compiler barrier for a float.
#pragma once

#include <cstdint>

namespace flash_dist {

// Returns the larger of two numbers, or NaN if one is NaN. Requires sm_80.
__device__ __forceinline__ float max_nan(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

// Returns the elementwise maximum of two pairs of bf16. Requires sm_80.
__device__ __forceinline__ uint32_t max_bf16x2(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

// Loads a float that other blocks update with atomics. The result may be an earlier value.
__device__ __forceinline__ float load_relaxed(const float* number) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(number) : "memory");
  return x;
}

// Makes the compiler compute x before the next product. Otherwise it would have to copy the
// accumulators that x depends on.
__device__ __forceinline__ void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }

}  // namespace flash_dist

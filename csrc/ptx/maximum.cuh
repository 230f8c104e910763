// Maxima of numbers.
#pragma once

namespace flash_dist {

// The larger of two numbers, NaN if one is. Since sm_80.
__device__ __forceinline__ float max_nan(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

}  // namespace flash_dist

// Arithmetic and comparisons of pairs of 16-bit elements in one register (sm_90 and newer).
#pragma once

#include <type_traits>

#include <cstdint>
#include "ptx/elements.h"

namespace flash_dist {

// Returns the rounded elementwise products of two pairs.
template <class T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  uint32_t r;
  if constexpr (std::is_same_v<T, Bf16>) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  }
  return r;
}

// Returns an elementwise mask: 0xffff where the element of x is at most that of y, and 0 elsewhere
// or where either element is NaN.
template <class T>
__device__ __forceinline__ uint32_t not_above(uint32_t x, uint32_t y) {
  uint32_t r;
  if constexpr (std::is_same_v<T, Fp16>) {
    asm("set.le.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  } else {
    asm("set.le.u32.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  }
  return r;
}

}  // namespace flash_dist

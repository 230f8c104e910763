// Bytes of registers.
#pragma once

#include <cstdint>

namespace flash_dist {

// Four of the bytes of {x, y}, by the four lowest digits of selector: 0 to 3 of x, 4 to 7 of y; 8 more for
// the byte's sign bit, eight times.
__device__ __forceinline__ uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(selector));
  return r;
}

}  // namespace flash_dist

// Rearranges the bytes of registers.
#pragma once

#include <cstdint>

namespace flash_dist {

// Returns four of the bytes of {x, y}. Each of the four lowest hexadecimal digits of selector
// chooses one byte: 0 to 3 from x, 4 to 7 from y. If 8 is added to a digit, the result has the sign
// bit of the chosen byte in all bits of the byte.
__device__ __forceinline__ uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(selector));
  return r;
}

}  // namespace flash_dist

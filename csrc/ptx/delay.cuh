// Delays at random, where threads hand something to each other: what a kernel computes must not
// depend on who comes first.
#pragma once

#include <cstdint>

namespace flash_dist {

// Nothing, unless the kernels are compiled to be tested so (FLASH_DIST_DELAYS, see docs/debugging.md).
// Then this warp sleeps: mostly for less than a microsecond, sometimes for a hundred times as long as
// a product takes.
//
// NOTE: no jump, so that nothing else about the code around it changes; the same for all lanes, so
// that they stay together.
__device__ __forceinline__ void delay() {
#ifdef FLASH_DIST_DELAYS
  uint32_t clock, multiprocessor, warp;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
  asm("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  asm("mov.u32 %0, %%warpid;" : "=r"(warp));
  uint32_t x = clock + multiprocessor * 0x9e3779b9u + warp * 0x85ebca6bu;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  x = (x ^ x >> 12) * 0x297a2d39u;
  x ^= x >> 15;
  const uint32_t nanoseconds = (x & 0x7fff) >> (x >> 28);  // mostly few
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
#endif
}

}  // namespace flash_dist

// Random delays wherever threads synchronize, to test that results do not depend on which thread
// arrives first.
#pragma once

#include <cstdint>

namespace flash_dist {

// Does nothing, unless the kernels are compiled with FLASH_DIST_DELAYS (docs/debugging.md). Then
// this warp sleeps: mostly for less than a microsecond, rarely for tens of microseconds, which is
// much longer than a matrix product takes.
//
// NOTE: delay() has no branch, so that the surrounding code stays the same. All lanes sleep equally
// long, so that they stay converged.
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
  const uint32_t nanoseconds = (x & 0x7fff) >> (x >> 28);  // short for most x
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
#endif
}

}  // namespace flash_dist

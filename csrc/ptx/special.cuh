// Special registers, read anew.
#pragma once

namespace flash_dist {

// threadIdx.x and blockIdx.x, read again: what is derived from them is computed anew after each
// call instead of being kept in registers between.
__device__ __forceinline__ int fresh_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ int fresh_block() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

}  // namespace flash_dist

// Special registers, read anew, and registers that warpgroups of one block give to each other
// (sm_90a).
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

// All warps of a warpgroup keep REGISTERS per thread from here on, a multiple of 8.
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// The same, waiting for what others give.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace flash_dist

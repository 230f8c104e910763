// Functions that keep the compiler from holding values in registers, and functions that move
// registers between the warpgroups of a block (sm_90a).
#pragma once

#include <cstdint>

namespace flash_dist {

// Read threadIdx.x and blockIdx.x again. The compiler then recomputes derived values after each
// call instead of keeping them in registers.
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

// Makes the compiler recompute values derived from x and y, instead of keeping them in registers.
__device__ __forceinline__ void forget(uint32_t& x, uint32_t& y) {
  asm volatile("" : "+r"(x), "+r"(y));
}

// Returns x, opaque to the compiler. Otherwise the compiler would compute addresses from x before
// the loop that uses them, and hold them in registers.
__device__ __forceinline__ int64_t fresh(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Reduces the registers of this warpgroup to REGISTERS per thread, a multiple of 8. All its warps
// must call this.
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Raises the registers of this warpgroup to REGISTERS per thread. Waits until other warpgroups have
// released enough registers.
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace flash_dist

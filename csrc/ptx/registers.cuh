// Registers that warpgroups of one block give to each other (sm_90a).
#pragma once

namespace flash_dist {

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

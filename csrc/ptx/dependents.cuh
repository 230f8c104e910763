// A kernel that starts while the one before it on the stream still runs. Since sm_90.
#pragma once

namespace flash_dist {

// Lets the next kernel start where it was launched so, core/behind.h: its blocks come when those of
// this one leave room.
template <class Target>
__device__ __forceinline__ void let_next_start() {
  if constexpr (Target::NUMBER >= 90) asm volatile("griddepcontrol.launch_dependents;");
}

// Waits until all that the kernel before has written is there.
template <class Target>
__device__ __forceinline__ void wait_for_previous() {
  if constexpr (Target::NUMBER >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash_dist

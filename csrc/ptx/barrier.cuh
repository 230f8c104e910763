// Barriers among some warps of a block, and a kernel that starts while the one before it on the stream
// still runs (sm_90 and newer).
#pragma once

#include "ptx/delay.cuh"

namespace flash_dist {

// Waits until `threads` threads (whole warps) have come to barrier `id`, 1..15; orders their shared
// memory accesses. __syncthreads() is barrier 0.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  delay();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Says to those who wait there that this warp has come, and does not wait.
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  delay();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
  delay();
}

// Lets the next kernel start where it was launched so, core/decode_combine.h: its blocks come when those of
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

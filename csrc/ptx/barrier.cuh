// Barriers among some warps of a block, and programmatic dependent launch: a kernel starts while
// the previous one on the stream still runs (sm_90 and newer).
#pragma once

#include "ptx/delay.cuh"

namespace flash_dist {

// Arrives at barrier `id`, 1..15, and waits until `threads` threads (whole warps) have arrived.
// Orders their shared memory accesses. __syncthreads() is barrier 0.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  delay();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at barrier `id` without waiting. threads: as in barrier_sync().
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  delay();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
  delay();
}

// Lets the next kernel start, if that kernel was launched with programmatic dependent launch
// (core/decode_combine.h). Its blocks start as soon as this kernel leaves room for them.
template <class Target>
__device__ __forceinline__ void let_next_start() {
  if constexpr (Target::NUMBER >= 90) asm volatile("griddepcontrol.launch_dependents;");
}

// Waits until the previous kernel has ended and its writes are visible.
template <class Target>
__device__ __forceinline__ void wait_for_previous() {
  if constexpr (Target::NUMBER >= 90) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace flash_dist

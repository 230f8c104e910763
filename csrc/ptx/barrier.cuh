// Barriers among some warps of a block.
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

}  // namespace flash_dist

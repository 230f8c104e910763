// Counters in global memory: tile schedulers, and semaphores that order blocks.
#pragma once

#include "ptx/delay.cuh"

namespace flash_dist {

// Tile scheduler: increments the counter atomically, and returns its previous value.
template <class Number>
__device__ __forceinline__ Number fetch_next(Number* counter) {
  const Number number = atomicAdd(counter, Number{1});
  delay();
  return number;
}

// Loads a semaphore. Writes that other blocks made before they raised it to this value are then
// visible.
__device__ __forceinline__ int load_acquire(const int* semaphore) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(semaphore) : "memory");
  return value;
}

// Increments a semaphore, after this thread's writes have become visible.
__device__ __forceinline__ void add_release(int* semaphore) {
  delay();
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

}  // namespace flash_dist

// Counters in global memory: of a tile scheduler, and semaphores by which blocks follow each other.
#pragma once

#include "ptx/delay.cuh"

namespace flash_dist {

// Tile scheduler: the next number of the counter, which no other block gets.
template <class Number>
__device__ __forceinline__ Number fetch_next(Number* counter) {
  const Number number = atomicAdd(counter, Number{1});
  delay();
  return number;
}

// The value of a semaphore. Writes that other blocks made before they raised it to that value are
// visible from here on.
__device__ __forceinline__ int load_acquire(const int* semaphore) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(semaphore) : "memory");
  return value;
}

// Raises a semaphore by one once this thread's writes are visible.
__device__ __forceinline__ void add_release(int* semaphore) {
  delay();
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

}  // namespace flash_dist

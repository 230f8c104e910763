// Counters in global memory by which blocks take turns.
#pragma once

#include "ptx/delay.cuh"

namespace flash_dist {

// The next number, which nobody else gets.
template <class Number>
__device__ __forceinline__ Number take_ticket(Number* counter) {
  const Number number = atomicAdd(counter, Number{1});
  delay();
  return number;
}

// What other blocks wrote before they raised the counter to this value is seen from here on.
__device__ __forceinline__ int load_acquire(const int* counter) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Raises the counter by one once this thread's writes can be seen.
__device__ __forceinline__ void add_release(int* counter) {
  delay();
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory");
}

}  // namespace flash_dist

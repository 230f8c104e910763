// Copies of neighbouring bytes between global and shared memory, by the copy engine (sm_90 and newer).
#pragma once

#include <cstdint>

#include "ptx/delay.cuh"

namespace flash_dist {

// A multiple of 16 bytes, from and to a multiple of 16 bytes; they count on the barrier.
__device__ __forceinline__ void load_bytes(uint32_t smem, const void* src, int bytes,
                                           uint32_t barrier) {
  delay();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same from shared memory, as part of this thread's next group of stores.
__device__ __forceinline__ void store_bytes(void* dst, uint32_t smem, int bytes) {
  delay();
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem),
               "r"(bytes)
               : "memory");
}

// Adds fp32 numbers to those at dst, as part of this thread's next group of stores.
__device__ __forceinline__ void add_floats(void* dst, uint32_t smem, int bytes) {
  delay();
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(smem), "r"(bytes)
      : "memory");
}

// Waits until all of this thread's groups of stores have been written.
__device__ __forceinline__ void wait_until_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// What this thread knows to have been written to global memory is seen by its next copies.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace flash_dist

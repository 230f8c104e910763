// Barriers in shared memory that count arrivals and the bytes of asynchronous copies. A phase ends
// after all expected arrivals, and after all expected bytes are copied. Phases have alternating
// parities; the first has parity 0.
#pragma once

#include <cstdint>

#include "ptx/delay.cuh"

namespace flash_dist {

// Initializes a barrier for `arrivals` arrivals per phase. Called by one thread, which must then
// call mbarriers_made() before __syncthreads().
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialized barriers visible to TMA and to the other blocks of the cluster.
__device__ __forceinline__ void mbarriers_made() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  delay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  delay();
}

// Arrives, and makes the phase also wait for `bytes` bytes of copies.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
  delay();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Makes the phase also wait for `bytes` bytes of copies, without arriving.
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t barrier, int bytes) {
  delay();
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Arrives once the cp.async copies that this thread has issued (ptx/copy.cuh) have landed.
__device__ __forceinline__ void mbarrier_arrive_behind_copies(uint32_t barrier) {
  delay();
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase with this parity has ended. During the first phase, which has parity 0,
// waiting for parity 1 returns at once.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
  delay();
}

}  // namespace flash_dist

// Copies from global to shared memory by Hopper's TMA unit, and the barriers that count their
// bytes. A phase of a barrier ends when all bytes have arrived. Phases alternate in parity; the
// first has parity 0.
#pragma once

#include <cstdint>

namespace own_kernels {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Initialises a barrier for one arrival per phase. Call it in one thread, before a __syncthreads().
__device__ __forceinline__ void init_barrier(uint64_t& barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_address(&barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // for the copy engine
}

// Makes the barrier's phase wait for `bytes`, and starts the copy. Addresses and `bytes` are
// multiples of 16.
__device__ __forceinline__ void start_copy(void* smem, const void* source, int bytes,
                                           uint64_t& barrier) {
  const uint32_t counter = smem_address(&barrier);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(counter), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(smem)),
      "l"(source), "r"(bytes), "r"(counter)
      : "memory");
}

// Waits until the phase of this parity has ended.
__device__ __forceinline__ void wait_for_copy(uint64_t& barrier, int parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "again_%=:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra again_%=;\n}" ::"r"(smem_address(&barrier)),
      "r"(parity)
      : "memory");
}

}  // namespace own_kernels

// Copies of neighbouring bytes from global to shared memory, by the copy engine (sm_90 and newer).
#pragma once

#include <cstdint>

namespace flash_dist {

// A multiple of 16 bytes, from and to a multiple of 16 bytes; they count on the barrier.
__device__ __forceinline__ void load_bytes(uint32_t smem, const void* src, int bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace flash_dist

// Asynchronous copies of single words to shared memory, for rows that begin at no multiple of 16
// bytes.
#pragma once

#include <cstdint>

namespace flash_dist {

// Copies 4 bytes to shared memory, asynchronously. If !valid, writes zeros and does not read src.
// Requires sm_80.
__device__ __forceinline__ void cp_async_4(uint32_t smem, const void* src, bool valid = true) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(src), "r"(bytes)
               : "memory");
}

}  // namespace flash_dist

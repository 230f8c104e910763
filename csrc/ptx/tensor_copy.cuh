// Copies between global and shared memory by the copy engine (TMA, sm_90 and newer): of boxes of
// tensors, and of neighbouring bytes. A CUtensorMap says where the tensor lies, how large a box is and how it
// is swizzled. Elements of a box outside the tensor read as zeros and are not written.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/delay.cuh"

namespace flash_dist {

// The map, a member of a __grid_constant__ parameter, is on its way into the constant cache.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Coordinates of a box's first element, innermost first.
struct BoxPlace {
  int column, row, member, head_kv, batch;
};

// The box to shared memory; its bytes count on the barrier, those outside of the tensor, too.
__device__ __forceinline__ void load_box(uint32_t smem, const CUtensorMap& map, const BoxPlace& at,
                                         uint32_t barrier) {
  delay();
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4, %5, %6}], [%7];" ::"r"(smem),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.member), "r"(at.head_kv), "r"(at.batch),
      "r"(barrier)
      : "memory");
}

// The box from shared memory, as part of this thread's next group of stores.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const BoxPlace& at,
                                          uint32_t smem) {
  delay();
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::
          "l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.member), "r"(at.head_kv), "r"(at.batch), "r"(smem)
      : "memory");
}

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

// Lets the next copies of this thread see the writes to global memory that it knows of.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until shared memory has been read by all but this thread's PENDING newest groups.
template <int PENDING>
__device__ __forceinline__ void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// What this thread has written to shared memory is seen by copies and matrix instructions that come
// after the next barrier.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flash_dist

// Copies between global and shared memory by TMA (sm_90 and newer): boxes of tensors, and
// contiguous bytes. A CUtensorMap holds the tensor's address, the size of a box and its swizzle.
// Elements of a box outside the tensor are read as zeros and not written.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx/delay.cuh"

namespace flash_dist {

// Prefetches a map, which must be a member of a __grid_constant__ parameter, into the constant
// cache.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
template <class... Maps>
__device__ __forceinline__ void prefetch_maps(const Maps&... maps) {
  (prefetch_map(maps), ...);
}

// Coordinates of a box's first element, innermost first.
struct BoxPlace {
  int column, row, member, head_kv, batch;
};

// Loads a box to shared memory. The barrier counts all bytes of the box, also those outside the
// tensor.
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

// L2 eviction priority of the bytes of a copy, as createpolicy.fractional encodes it.
enum class Caching : uint64_t { NORMAL = 0x1000000000000000, EVICT_FIRST = 0x12f0000000000000 };

// Like load_box(), with an L2 eviction priority.
__device__ __forceinline__ void load_box(uint32_t smem, const CUtensorMap& map, const BoxPlace& at,
                                         uint32_t barrier, Caching caching) {
  delay();
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(smem),
      "l"(&map), "r"(at.column), "r"(at.row), "r"(at.member), "r"(at.head_kv), "r"(at.batch),
      "r"(barrier), "l"(static_cast<uint64_t>(caching))
      : "memory");
}

// Fetches a box into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, const BoxPlace& at) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
               "r"(at.column), "r"(at.row), "r"(at.member), "r"(at.head_kv), "r"(at.batch)
               : "memory");
}

// Stores a box from shared memory, as part of this thread's next group of stores.
__device__ __forceinline__ void store_box(const CUtensorMap& map, const BoxPlace& at,
                                          uint32_t smem) {
  delay();
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4, %5}], [%6];" ::
          "l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.member), "r"(at.head_kv), "r"(at.batch), "r"(smem)
      : "memory");
}

// Loads contiguous bytes, which the barrier counts. Size and both addresses must be multiples of 16
// bytes.
__device__ __forceinline__ void load_bytes(uint32_t smem, const void* src, int bytes,
                                           uint32_t barrier) {
  delay();
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(src), "r"(bytes), "r"(barrier)
      : "memory");
}

// Stores contiguous bytes from shared memory, as part of this thread's next group of stores.
__device__ __forceinline__ void store_bytes(void* dst, uint32_t smem, int bytes) {
  delay();
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(smem),
               "r"(bytes)
               : "memory");
}

// Adds fp32 values in shared memory to the values at dst, as part of this thread's next group of
// stores.
__device__ __forceinline__ void add_floats(void* dst, uint32_t smem, int bytes) {
  delay();
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(smem), "r"(bytes)
      : "memory");
}

// Waits until all groups of stores of this thread are complete.
__device__ __forceinline__ void wait_until_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes writes to global memory that are visible to this thread also visible to its later copies.
__device__ __forceinline__ void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but this thread's PENDING newest groups of stores have read shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Makes this thread's writes to shared memory visible to copies and wgmma after the next barrier.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flash_dist

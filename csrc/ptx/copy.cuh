// Copies between global memory, shared memory and registers.
#pragma once

#include <cstdint>

namespace flash_dist {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes to shared memory, asynchronously. If !valid, writes zeros and does not read src.
// Requires sm_80.
__device__ __forceinline__ void cp_async_16(uint32_t smem, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(src), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the PENDING newest groups of this thread are in flight.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ uint4 load_global_16(const void* src) {
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(src));
  return r;
}

// The load_constant functions load from memory that does not change while the kernel runs.
__device__ __forceinline__ uint32_t load_constant_2(const void* src) {
  uint16_t x;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(x) : "l"(src));
  return x;
}

__device__ __forceinline__ uint32_t load_constant_4(const void* src) {
  uint32_t x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(src));
  return x;
}

__device__ __forceinline__ float load_constant_float(const void* src) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(src));
  return x;
}

__device__ __forceinline__ float2 load_constant_float2(const void* src) {
  float2 r;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(src));
  return r;
}

__device__ __forceinline__ void store_global_16(void* dst, uint4 r) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "r"(r.x), "r"(r.y), "r"(r.z),
               "r"(r.w)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t smem) {
  uint4 r;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(smem)
               : "memory");
  return r;
}

__device__ __forceinline__ float2 load_shared_8(uint32_t smem) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(smem) : "memory");
  return r;
}

__device__ __forceinline__ uint32_t load_shared_4(uint32_t smem) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(smem) : "memory");
  return x;
}

__device__ __forceinline__ void store_shared_16(uint32_t smem, uint4 r) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r.x), "r"(r.y), "r"(r.z),
               "r"(r.w)
               : "memory");
}

__device__ __forceinline__ void store_shared_8(uint32_t smem, uint32_t low, uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem), "r"(low), "r"(high) : "memory");
}

__device__ __forceinline__ void store_shared_4(uint32_t smem, uint32_t r) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(r) : "memory");
}

}  // namespace flash_dist

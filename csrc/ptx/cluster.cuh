// Access of a cluster's blocks to each other's shared memory (sm_90 and newer).
#pragma once

#include <cstdint>

#include "ptx/delay.cuh"

namespace flash_dist {

// Returns the rank of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits until all threads of the cluster have arrived. Their earlier writes are then visible to
// all.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Arrives without releasing this warp's writes. cluster_wait() waits for all warps of the cluster.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Returns the address in block `rank` of the cluster that corresponds to `smem` in this block.
__device__ __forceinline__ uint32_t address_in(int rank, uint32_t smem) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem), "r"(rank));
  return r;
}

// Returns 0. Code that uses the result waits for x, because ptxas does not know that rank / 16 is
// 0. Without this wait, an arrival at a barrier of another block, or a store to its memory, may
// overtake earlier loads from shared memory.
__device__ __forceinline__ uint32_t zero_behind(uint32_t x, int rank) {
  return x & static_cast<unsigned>(rank) / 16;
}

// Arrives at a barrier of another block, to tell that block that it may overwrite data that this
// thread has read.
//
// NOTE: the instruction is not .release.cluster, which would wait for all earlier stores of this
// thread.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier) {
  delay();
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
  delay();
}

// Stores 16 bytes to the shared memory of another block, which may read them after cluster_sync().
__device__ __forceinline__ void store_cluster_16(uint32_t smem, float4 x) {
  delay();
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}

// Stores 16 bytes to the shared memory of another block, asynchronously. `barrier`, which is in the
// same memory, counts the bytes.
__device__ __forceinline__ void store_remote_16(uint32_t smem, uint4 r, uint32_t barrier) {
  delay();
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(smem),
      "r"(r.x), "r"(r.y), "r"(r.z), "r"(r.w), "r"(barrier)
      : "memory");
}

}  // namespace flash_dist

// Barriers between the loading thread and the consumers: the loader fills a stage of a ring and arrives
// at its full barrier; a consumer warp that has read the stage arrives at its empty barrier.
#pragma once

#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "sm90/ring.cuh"

namespace flash_dist {

// Barriers among consumers, beside __syncthreads().
enum ConsumerBarrier : int { ALL_CONSUMERS = 1, ONE_CONSUMER };

// Number of this thread's warpgroup among the consumers, and of its warp in that.
__device__ __forceinline__ int consumer() { return fresh_thread() / WARPGROUP - 1; }
__device__ __forceinline__ int warp_of_consumer() { return fresh_thread() / 32 % WARPS_OF_GROUP; }

template <int STAGES>
struct StageBarriers {
  uint64_t full[STAGES], empty[STAGES];

  // Called by one thread. Each filler of a stage arrives once, with the bytes of its copies or without.
  __device__ __forceinline__ void make(int consumer_warps, int fillers = 1) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared_address(&full[i]), fillers);
      mbarrier_init(shared_address(&empty[i]), consumer_warps);
    }
  }
  // Waits until the consumers have read the next stage, which is empty at first.
  __device__ __forceinline__ void wait_for_place(const Ring<STAGES>& ring) const {
    mbarrier_wait(shared_address(&empty[ring.stage()]), ring.parity() ^ 1);
  }
  __device__ __forceinline__ void wait_for_data(const Ring<STAGES>& ring) const {
    mbarrier_wait(shared_address(&full[ring.stage()]), ring.parity());
  }
  // The full barrier of the next stage: copies count their bytes there.
  __device__ __forceinline__ uint32_t data(const Ring<STAGES>& ring) const {
    return shared_address(&full[ring.stage()]);
  }
  // Tells that the stage is filled, by stores and not by copies.
  __device__ __forceinline__ void arrive(const Ring<STAGES>& ring) const {
    mbarrier_arrive(data(ring));
  }
  // Tells that this warp has read a stage.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&empty[stage]));
  }
};

}  // namespace flash_dist

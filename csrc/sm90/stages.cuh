// How consumers and the thread that loads hand stages of a ring to each other: it fills them, each
// announced by a barrier (full); a warp that has read one says so by another (empty).
#pragma once

#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special.cuh"
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

  // By one thread. Whoever fills a stage arrives once, with the bytes of its copies or without any.
  __device__ __forceinline__ void make(int consumer_warps, int fillers = 1) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared_address(&full[i]), fillers);
      mbarrier_init(shared_address(&empty[i]), consumer_warps);
    }
  }
  // Until the consumers have read what lies in the next stage: nothing at first.
  __device__ __forceinline__ void wait_for_place(const Ring<STAGES>& ring) const {
    mbarrier_wait(shared_address(&empty[ring.stage()]), ring.parity() ^ 1);
  }
  __device__ __forceinline__ void wait_for_data(const Ring<STAGES>& ring) const {
    mbarrier_wait(shared_address(&full[ring.stage()]), ring.parity());
  }
  // What copies to a stage count on.
  __device__ __forceinline__ uint32_t data(const Ring<STAGES>& ring) const {
    return shared_address(&full[ring.stage()]);
  }
  // The thread that fills the stage without copies has done so.
  __device__ __forceinline__ void arrive(const Ring<STAGES>& ring) const {
    mbarrier_arrive(data(ring));
  }
  // This warp has read a stage.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&empty[stage]));
  }
};

}  // namespace flash_dist

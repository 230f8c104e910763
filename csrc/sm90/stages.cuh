// Barriers between the loading thread and the consumers. The loader fills a stage of a ring and
// arrives at the stage's full barrier. A consumer warp that has read the stage arrives at the
// stage's empty barrier.
#pragma once

#include "ptx/copy.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "sm90/ring.cuh"

namespace flash_dist {

// Named barriers: ALL_CONSUMERS for all consumers, ONE_CONSUMER + i for the warps of consumer i.
// __syncthreads() uses barrier 0.
enum ConsumerBarrier : int { ALL_CONSUMERS = 1, ONE_CONSUMER };

// consumer(): index of this thread's warpgroup among the consumers. warp_of_consumer(): index of
// this thread's warp in the warpgroup.
__device__ __forceinline__ int consumer() { return fresh_thread() / WARPGROUP - 1; }
__device__ __forceinline__ int warp_of_consumer() { return fresh_thread() / 32 % WARPS_OF_GROUP; }

template <int STAGES>
struct StageBarriers {
  uint64_t full[STAGES], empty[STAGES];

  // Initializes the barriers. Called by one thread. consumer_warps: arrivals per phase at an empty
  // barrier. fillers: arrivals per phase at a full barrier, in addition to the bytes of copies.
  __device__ __forceinline__ void make(int consumer_warps, int fillers = 1) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      mbarrier_init(shared_address(&full[i]), fillers);
      mbarrier_init(shared_address(&empty[i]), consumer_warps);
    }
  }
  // Waits until the next stage is empty: the consumers have read it, or it was never filled.
  __device__ __forceinline__ void wait_for_place(const Ring<STAGES>& ring) const {
    mbarrier_wait(shared_address(&empty[ring.stage()]), ring.parity() ^ 1);
  }
  __device__ __forceinline__ void wait_for_data(const Ring<STAGES>& ring) const {
    mbarrier_wait(shared_address(&full[ring.stage()]), ring.parity());
  }
  // Returns the address of the next stage's full barrier, which counts the bytes of copies.
  __device__ __forceinline__ uint32_t data(const Ring<STAGES>& ring) const {
    return shared_address(&full[ring.stage()]);
  }
  // Arrives at the full barrier, after filling the stage with stores instead of copies.
  __device__ __forceinline__ void arrive(const Ring<STAGES>& ring) const {
    mbarrier_arrive(data(ring));
  }
  // Arrives at the empty barrier: this warp has read the stage.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&empty[stage]));
  }
};

}  // namespace flash_dist

// The threads of a block of the fused backward that store dQ. Each adds the parts of its own query
// tiles to the sums in global memory, in the order of the semaphores.
#pragma once

#include "ptx/semaphore.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/bwd_fused/config.h"

namespace flash_dist {

template <class Config>
struct FusedSm90DqStore {
  const typename Config::Params& params;
  typename Config::Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;

  // Stores dQ, in one thread. warp: the thread's index among those that store dQ. The thread has
  // its own stage of dQ, or shares the only stage with another thread. `ready` completes when a
  // part of dQ may be written to the stage, or when the sum may be read from the stage.
  __device__ __forceinline__ void store_dq(int warp) const {
    constexpr bool TAKES_TURNS = Config::DQ_THREADS > Config::DQ_STAGES;
    const int number = TAKES_TURNS ? 0 : warp;
    const uint32_t stage = shared_address(smem.dq[number]);
    const uint32_t ready = shared_address(&smem.dq_ready[number]);
    const uint32_t done = shared_address(&smem.dq_done[number]);
    const auto pass_on = [&] {
      if constexpr (TAKES_TURNS) mbarrier_arrive(shared_address(&smem.dq_read));
    };
    int parity = 0;
    if (warp < work.items) describe_dq(warp);
#pragma unroll 1
    for (int i = warp; i < work.items; i += Config::DQ_THREADS, parity ^= 1) {
      const DqItem& item = smem.dq_item[i % Config::DQ_ITEMS];
      DqOrder order = item.order;
      int tile = item.tile;
      bool takes = order.is_last && order.before > 0;
      if constexpr (TAKES_TURNS) {
        if (i > 0) mbarrier_wait(shared_address(&smem.dq_read), (i - 1) % 2);
      }
      if (!takes) mbarrier_arrive(ready);
      // Describe the next item while dQ is computed.
      if (i + Config::DQ_THREADS < work.items) describe_dq(i + Config::DQ_THREADS);
      if constexpr (TAKES_TURNS) {  // reads the item again: its values would be spilled
        order = item.order;
        tile = item.tile;
        takes = order.is_last && order.before > 0;
      }
      float* sum = p.dq_accum + static_cast<int64_t>(tile) * Config::DQ_FLOATS;
      if (order.before > 0) wait_for_semaphore(tile, order);
      if (takes) {
        mbarrier_expect(ready, Config::DQ_BYTES);
        load_bytes(stage, sum, Config::DQ_BYTES, ready);
      }
      mbarrier_wait(done, TAKES_TURNS ? i % 2 : parity);
      if (!order.exists() || order.is_last) {
        pass_on();
        continue;
      }
      if (order.before == 0) {
        store_bytes(sum, stage, Config::DQ_BYTES);
      } else {
        add_floats(sum, stage, Config::DQ_BYTES);
      }
      commit_stores();
      if constexpr (TAKES_TURNS) wait_until_read<0>();
      pass_on();
      wait_until_written();
      add_release(semaphore_of(tile));
    }
  }

 private:
  // Returns the number of tiles of a head in dq_accum, which pads a head to complete tiles of 128
  // queries.
  __device__ __forceinline__ int tiles_per_head() const {
    return (p.seqlen_q + STATISTICS_ALIGNMENT - 1) / STATISTICS_ALIGNMENT *
           (STATISTICS_ALIGNMENT / Config::BLOCK_M);
  }

  // Describes item `number` for the computation of dQ.
  __device__ __forceinline__ void describe_dq(int number) const {
    const FusedCursor<Config> cursor(p, work, number);
    DqItem& item = smem.dq_item[number % Config::DQ_ITEMS];
    const int m = cursor.row0() / Config::BLOCK_M;
    const int4* known = cursor.known(p, work);
    item.row0 = m * Config::BLOCK_M;
    item.head_in_group = cursor.head_in_group;
    item.tile = (work.block.unit * p.group + cursor.head_in_group) * tiles_per_head() + m;
    item.order = find_order<Config::BLOCK_N>(p, work, known == nullptr ? int4{} : *known, m);
    mbarrier_arrive(shared_address(&smem.described[number % Config::DQ_ITEMS]));
  }

  __device__ __forceinline__ int* semaphore_of(int tile) const { return p.dq_turns + 1 + tile; }

  // Waits until every earlier block has added its part, and makes these parts visible to this
  // thread's copies.
  __device__ __forceinline__ void wait_for_semaphore(int tile, const DqOrder& order) const {
    while (load_acquire(semaphore_of(tile)) != order.before) {
    }
    fence_proxy_async_global();
  }
};

}  // namespace flash_dist

// The warpgroups of the fused backward that compute dQ. Warpgroup 3 computes all columns, or each of
// the warpgroups of keys half of them (KEYS_MULTIPLY).
#pragma once

#include "ptx/barrier.cuh"
#include "sm90/bwd_fused/dq_sum.cuh"

namespace flash_dist {

template <class Config>
struct FusedSm90Dq {
  using Gradients = typename Config::Gradients;
  using Half = DqHalf<Config>;
  using Sum = DqSum<Config>;

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;

  // Computes dQ, in warpgroup 3.
  __device__ __forceinline__ void sum_queries() const {
    if (work.items == 0) return;
    Sum sum;
    mbarrier_wait(shared_address(&smem.keys_full), 0);
    barrier_sync(KEYS_CLEARED, Config::KEY_READERS);
    Gradients place;
    int dq_stage = 0, dq_parity = 0;
    // NOTE: the number of items is read again in each step: kept in a register, it would be
    // spilled.
#pragma unroll 1
    for (; static_cast<int>(place.passed) < work.items; place.advance()) {
      mbarrier_wait(shared_address(&smem.ds_full[place.stage()]), place.parity());
      const int number = place.passed % Config::DQ_ITEMS;
      mbarrier_wait(shared_address(&smem.described[number]), place.passed / Config::DQ_ITEMS % 2);
      const DqItem& item = smem.dq_item[number];
      const DqOrder order = item.order;
      const uint32_t ds = uniform(shared_address(smem.ds[place.stage()]));
#pragma unroll
      for (int part = 0; part < Sum::PARTS; ++part) {
        const uint32_t stage = shared_address(smem.dq[dq_stage]) + part * Sum::BYTES;
        if (order.exists()) sum.multiply(ds, shared_address(smem.k), part);
        if (part == Sum::PARTS - 1) arrive_with_warp(smem.ds_empty[place.stage()]);
        if (part == 0) mbarrier_wait(shared_address(&smem.dq_ready[dq_stage]), dq_parity);
        if (order.is_last) {
          if (order.before > 0) sum.add(stage);
          sum.finish(stage, p.softmax_scale, DqRows(p, work, item), part * Sum::COLUMNS);
        } else if (order.exists()) {
          sum.put(stage);
          fence_proxy_async();
        }
      }
      arrive_with_warp(smem.dq_done[dq_stage]);
      if (++dq_stage == Config::DQ_STAGES) dq_stage = 0, dq_parity ^= 1;
    }
    barrier_arrive(KEYS_READ, Config::KEY_READERS);
  }

  // Computes this warpgroup's half of the columns of dQ, after which the caller must call
  // hand_over(). One earlier product may still be in flight; calls after() when it is complete.
  template <class After>
  __device__ __forceinline__ void sum_half(int half, const Gradients& place,
                                           const After& after) const {
    const Half columns{half};
    const uint32_t ds = shared_address(smem.ds[0]);
    const uint32_t keys = shared_address(smem.k);
    const uint32_t stage = shared_address(smem.dq[0]);
    typename Half::Panel panel;
    typename Half::Rest rest;
    mbarrier_wait(shared_address(&smem.ds_full[0]), place.parity());
    rest.issue(ds, columns.rest_of_keys(keys));
    wgmma_wait<1>();
    after();
    panel.issue(ds, columns.panel_of_keys(keys));
    const int number = place.passed % Config::DQ_ITEMS;
    mbarrier_wait(shared_address(&smem.described[number]), place.passed / Config::DQ_ITEMS % 2);
    const DqItem& item = smem.dq_item[number];
    const DqOrder order = item.order;
    const bool adds = order.exists() && !order.is_last;
    mbarrier_wait(shared_address(&smem.dq_ready[0]), place.parity());
    wgmma_wait<1>();
    hold(rest.x[0]);
    if (adds) rest.put(columns.rest_of_stage(stage));
    wgmma_wait<0>();
    hold(panel.x[0]);
    arrive_with_warp(smem.ds_empty[0]);
    if (adds) {
      panel.put(columns.panel_of_stage(stage));
    } else if (order.is_last) {
      finish(panel, columns.panel_of_stage(stage), item, columns.panel());
      finish(rest, columns.rest_of_stage(stage), item, columns.rest());
    }
  }
  // Reports that this warp has written its part of dQ, or has read the sum. Called in the next
  // step, after the first product of that step has been issued.
  __device__ __forceinline__ void hand_over() const {
    fence_proxy_async();
    arrive_with_warp(smem.dq_done[0]);
  }

 private:
  // Arrives at a barrier, once per warp.
  __device__ __forceinline__ static void arrive_with_warp(uint64_t& barrier) {
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&barrier));
  }
  // Writes columns of dQ. The stage holds the sum of earlier blocks, if there are any.
  template <class Columns>
  __device__ __forceinline__ void finish(Columns& columns, uint32_t stage, const DqItem& item,
                                         int column) const {
    if (item.order.before > 0) columns.add(stage);
    columns.finish(stage, p.softmax_scale, DqRows(p, work, item), column);
  }
};

}  // namespace flash_dist

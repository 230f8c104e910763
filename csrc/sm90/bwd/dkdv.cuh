// dK and dV on Hopper, and dS for the dQ product: the key side of the backward. It needs no
// atomics, because each block owns its keys.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// Grid      x = one block for each key tile and group split of each (batch, kv head) pair of the
//           chunk.
// Block     One loading thread in its own warpgroup, and 2 warpgroups of 64 keys each. A warpgroup
//           skips tiles that are masked for its keys. P^T and dS^T stay in registers as A operands.
// Shared    K and V (for the block's lifetime), STAGES stages of Q, dO, lse and delta.
// Pipeline  The query tiles of every query head of the split, head by head, in ascending order.
//           This is the order of summation. The product for dP^T runs while P^T is computed, and
//           the one for dV while dS^T is. Between query chunks the sums are kept in global memory.
//
// If the registers of one block cannot hold both sums, two blocks share the keys (dkdv_pair.cuh).
#pragma once

#include "sm90/bwd/dkdv_steps.cuh"

namespace flash_dist {

template <class Config>
struct DkdvSm90 {
  using Steps = DkdvSm90Steps<Config>;
  using Scores = typename Steps::Scores;
  using Fragments = typename Steps::Fragments;
  using StageStatistics = typename Steps::StageStatistics;
  using DkSum = typename Steps::DkSum;
  using DvSum = typename Steps::DvSum;
  using Stages = Ring<Config::STAGES>;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int SCORE_MOD_SHIFT = Steps::SCORE_MOD_SHIFT;

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;
  const Steps steps{params, smem};

  // Loads K, V and the stages of queries, in one thread.
  __device__ __forceinline__ void load() const {
    if (work.items == 0) return;
    steps.load_keys();
    DkdvCursor<Config> cursor(p, work);
    Stages stages;
#pragma unroll 1
    for (int i = 0; i < work.items; ++i, stages.advance()) {
      smem.barriers.wait_for_place(stages);
      steps.describe(smem.item[stages.stage()], cursor);
      steps.load_queries(cursor, stages.stage());
      cursor.next(p, work);
    }
  }

  // Computes dK and dV, in a warpgroup of 64 keys.
  __device__ __forceinline__ void compute() const {
    DkSum dk;
    DvSum dv;
    dk.clear();
    dv.clear();
    if (!p.sums_first) {
      steps.each_partial(dk, p.dk_partial,
                         [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
      steps.each_partial(dv, p.dv_partial,
                         [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
    }
    mainloop(dk, dv);
    if (SCORE_MOD_SHIFT != 0 && p.sums_last) dv.scale(1.0f / (1 << SCORE_MOD_SHIFT));
    steps.store(dk, dv);
  }

 private:
  __device__ __forceinline__ void mainloop(DkSum& dk, DvSum& dv) const {
    if (work.items == 0) return;
    mbarrier_wait(shared_address(&smem.keys_full), 0);
    steps.clear_keys();
    Stages stages;
#pragma unroll 1
    for (int left = work.items; left > 0; --left, stages.advance()) {
      smem.barriers.wait_for_data(stages);
      const int s = stages.stage();
      const int code = tile_code(p, work, smem.item[s], consumer());
      if (code != TILE_EMPTY) {
        steps.clear_queries(s, smem.item[s].row0);
        add(dk, dv, s, code);
      }
      smem.barriers.release(s);
    }
  }

  // Adds the products of stage s to dK and dV.
  __device__ __forceinline__ void add(DkSum& dk, DvSum& dv, int s, int code) const {
    const uint32_t q = uniform(shared_address(smem.stage[s].q));
    const uint32_t dout = uniform(shared_address(smem.stage[s].dout));
    Scores pt, dst;
    Fragments probabilities, gradients;
    Fragments products;  // with soft cap or ALiBi: dS^T is computed from these
    const float slope = steps.slope_of(smem.item[s]);
    // S^T = K @ Q.T                                       [64, BLOCK_M]
    Steps::template issue_scores<Config::HEAD_DIM>(pt, uniform(steps.own_k()), q);
    // dP^T = V @ dO.T                                     [64, BLOCK_M]
    const auto issue_gradients = [&] {
      Steps::template issue_scores<Config::HEAD_DIM_V>(dst, uniform(steps.own_v()), dout);
    };
    if constexpr (Config::SCORES_AT_A_TIME == 2) issue_gradients();
    wgmma_wait<Config::SCORES_AT_A_TIME - 1>();
    hold(pt.x[0]);
    if constexpr (Config::HAS_SCORE_MOD) begin_softcap(pt, params.score_mod);
    if (code != TILE_FULL) steps.apply_mask(pt, smem.item[s], code);
    // P^T = exp2(S^T * scale - lse)
    if constexpr (Config::HAS_SCORE_MOD) {
      steps.weigh_modified(probabilities, products, pt, smem.lse_log2[s],
                           steps.alibi_of(smem.item[s], slope));
    } else {
      steps.exponentiate(pt, StageStatistics(smem.lse_log2[s], fresh_thread() % 4 * 8));
      Steps::to_fragments(probabilities, pt);
    }
    if constexpr (Config::SCORES_AT_A_TIME == 1) issue_gradients();
    // dV += P^T @ dO                                      [64, HEAD_DIM_V]
    Steps::issue_sum(dv, probabilities, dout);
    wgmma_wait<1>();
    hold(dst.x[0]);
    // dS^T = P^T * (dP^T - delta)
    const StageStatistics delta(smem.delta[s], fresh_thread() % 4 * 8);
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 x = delta[n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float minus = i % 2 == 0 ? x.x : x.y;
        dst.x[0][n][i] =
            weight(pt, products, n, i) * minus_delta<typename Config::T>(dst.x[0][n][i], minus);
      }
    }
    // dK += dS^T @ Q                                      [64, HEAD_DIM]
    Steps::to_fragments(gradients, dst);
    steps.store_gradients(gradients, smem.item[s]);
    Steps::issue_sum(dk, gradients, q);
    wgmma_wait<0>();
    hold(dk.x[0]);
    hold(dv.x[0]);
    hold(probabilities);
    hold(gradients);
  }

  // Returns the factor by which dP^T - delta of score (n, i) is multiplied to get dS^T.
  __device__ __forceinline__ static float weight(const Scores& pt, const Fragments& products, int n,
                                                 int i) {
    if constexpr (Config::HAS_SCORE_MOD) {
      const float2 two = unpack<typename Config::T>(products[n / 2][0][n % 2 * 2 + i / 2]);
      return (i % 2 == 0 ? two.x : two.y) * (1.0f / (1 << SCORE_MOD_SHIFT));
    } else {
      return pt.x[0][n][i];
    }
  }
};

template <class Config>
__device__ __forceinline__ void dkdv_of_block(const typename Config::Params& params) {
  const BwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DkdvBlock block(p, Config::BLOCK_N);
  const Sequence sequence(p, block.batch);
  if (block.key0 >= sequence.seqlen_k) return;

  if (threadIdx.x == 0) {
    prefetch_maps(params.q, params.k, params.v, params.dout);
    mbarrier_init(shared_address(&smem.keys_full), 1);
    smem.barriers.make(Config::CONSUMERS * 4);
    mbarriers_made();
    find_dkdv_work<Config>(smem.work, p, block, sequence);
  }
  __syncthreads();  // the work and the barriers are initialized

  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x == 0) DkdvSm90<Config>{params, smem}.load();
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    DkdvSm90<Config>{params, smem}.compute();
  }
}

}  // namespace flash_dist

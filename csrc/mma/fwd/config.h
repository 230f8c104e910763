// Work, tiles, threads and shared memory of the mma.sync forward kernel.
#pragma once

#include <type_traits>

#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/config.h"
#include "core/scores.cuh"
#include "core/sequence.cuh"
#include "plans.h"

namespace flash_dist {

// The work tile of a block, shared by its threads.
template <int BLOCK_M, int BLOCK_N>
struct FwdWork {
  const uint16_t *k, *v;  // first key and value of the sequence
  int row0;               // first query of the block
  MaskPlace place;
  RowSpan keys;  // the result of Mask::keys_that_exist()
  float slope;   // ALiBi slope
  KeyBlockIterator<BLOCK_M, BLOCK_N> blocks;

  __device__ __forceinline__ FwdWork(const FwdParams& p, const FwdBlock& block,
                                     const Sequence& sequence)
      : k(head_begin(p.k, block.batch, block.head_kv, 0) + sequence.k0 * p.k.row),
        v(head_begin(p.v, block.batch, block.head_kv, 0) + sequence.k0 * p.v.row),
        row0(block.row0),
        place(p.mask, sequence, block.batch, block.head),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)),
        slope(alibi_slope(p.scores, block.batch, block.head)),
        blocks(Mask(p.mask, place), block.row0) {}
};

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool DROPS_ = false>
struct FwdConfigOf : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr bool DROPS = DROPS_;
  using Plan::
      SPLIT;  // warps that share ROWS queries: each has some keys of S, then some columns of O
  static constexpr int BLOCK_M = Plan::WARPS / SPLIT * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = Plan::ROWS / 16;
  static constexpr int KEYS = Plan::BLOCK_N / SPLIT;  // keys of a warp's S

  struct NoExchange {};
  struct Exchange {
    alignas(16) uint16_t p[BLOCK_M * Plan::BLOCK_N];  // stored as A fragments
    float rows[SPLIT][BLOCK_M];  // row maxima over a warp's keys; at the end row sums
  };

  struct Smem {
    alignas(128) uint16_t q[BLOCK_M * HEAD_DIM];  // reused to stage the output
    alignas(128) uint16_t k[Plan::BLOCK_N * HEAD_DIM];
    alignas(128) uint16_t v[Plan::BLOCK_N * HEAD_DIM_V];
    FwdWork<BLOCK_M, Plan::BLOCK_N> work;
    std::conditional_t<SPLIT == 1, NoExchange, Exchange> exchange;
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  // True if FwdWork is read from shared memory, because the accumulators need the registers. At
  // head_dim 64, registers are 5 % faster on an H200.
  static constexpr bool SHARES_WORK =
      HEAD_DIM > 64 || !Target::HAS_CP_ASYNC || Target::NUMBER >= 100;
  static constexpr int UNROLL = DROPS ? 2 : STEPS_AHEAD<Target>;
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using FwdConfig =
    FwdConfigOf<FwdPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

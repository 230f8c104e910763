// Work, tiles, threads and shared memory of the fp32 forward kernel.
#pragma once

#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/config.h"
#include "core/scores.cuh"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "plans.h"

namespace flash_dist {

// The work tile of a block, shared by its threads.
template <int BLOCK_M, int BLOCK_N>
struct F32FwdWork {
  const float *q, *k, *v;  // the block's first query, the sequence's first key
  int row0;                // index of the block's first query
  int rows;                // queries from row0 to the end of the sequence
  MaskPlace place;
  RowSpan keys;  // the result of Mask::keys_that_exist()
  float slope;   // ALiBi slope
  KeyBlockIterator<BLOCK_M, BLOCK_N> blocks;

  __device__ __forceinline__ F32FwdWork(const FwdParams& p, const FwdBlock& block,
                                        const Sequence& sequence)
      : q(head_begin<float>(p.q, block.batch, block.head_kv, block.head_in_group) +
          (sequence.q0 + block.row0) * p.q.row),
        k(head_begin<float>(p.k, block.batch, block.head_kv, 0) + sequence.k0 * p.k.row),
        v(head_begin<float>(p.v, block.batch, block.head_kv, 0) + sequence.k0 * p.v.row),
        row0(block.row0),
        rows(sequence.seqlen_q - block.row0),
        place(p.mask, sequence, block.batch, block.head),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)),
        slope(alibi_slope(p.scores, block.batch, block.head)),
        blocks(Mask(p.mask, place), block.row0) {}
};

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool DROPS_ = false>
struct F32FwdTiles : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr bool DROPS = DROPS_;
  using Plan::SPLIT, Plan::ROWS, Plan::WARPS, Plan::BLOCK_N;
  static constexpr int BLOCK_M = WARPS / SPLIT * ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = ROWS / 16;
  static constexpr int SLICE = HEAD_DIM / SPLIT;
  static_assert(HEAD_DIM == HEAD_DIM_V && WARPS % SPLIT == 0 && SLICE % 32 == 0);

  struct Smem {
    alignas(128) float q[BLOCK_M * HEAD_DIM];
    alignas(128) float k[BLOCK_N * HEAD_DIM];
    alignas(128) float v[BLOCK_N * HEAD_DIM];
    alignas(16) float exchange[SPLIT == 1 ? 4 : WARPS * ROWS * BLOCK_N];
    F32FwdWork<BLOCK_M, BLOCK_N> work;
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32FwdConfig =
    F32FwdTiles<F32FwdPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32FwdConfig =
    F32FwdTiles<Ieee32FwdPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

// Finds the largest score of each query head, for calls whose forward does not find it.
//
//   S = Q @ K.T   score modification, mask   max(S)
//
// Grid      x = query tile, head and batch entry, as in the forward.
// Block     4 warps; each owns ROWS queries of a tile. The block reads 64 keys at a time.
// Shared    2 stages of 64 columns of Q and K. If the stages hold all columns of Q, Q is copied
//           once.
#pragma once

#include "core/config.h"
#include "core/fwd_steps.cuh"
#include "core/max_logit.cuh"
#include "core/max_logit.h"
#include "core/pipeline.cuh"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "native/entry.h"

namespace flash_dist {

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct AnyMaxLogitConfig : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr int BLOCK_M = Plan::WARPS * Plan::ROWS, BLOCK_N = MASK_TILE;
  static constexpr int ROW_TILES = Plan::ROWS / 16;
  static constexpr int COLUMNS = 64;  // columns of Q and K per step
  static constexpr int STAGES = 2;

  struct Stage {
    alignas(128) Element<T> q[BLOCK_M * COLUMNS];
    alignas(128) Element<T> k[BLOCK_N * COLUMNS];
  };
  struct Smem {
    Stage stage[STAGES];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

// The work tile of a block.
template <int BLOCK_M, int BLOCK_N>
struct MaxLogitWork {
  int row0;  // first query of the block
  MaskPlace place;
  float slope;  // ALiBi slope
  KeyBlockIterator<BLOCK_M, BLOCK_N> blocks;

  __device__ __forceinline__ MaxLogitWork(const FwdParams& p, const FwdBlock& block,
                                          const Sequence& sequence)
      : row0(block.row0),
        place(p.mask, sequence, block.batch, block.head),
        slope(alibi_slope(p.scores, block.batch, block.head)),
        blocks(Mask(p.mask, place), block.row0) {}
};

// A step copies or multiplies 64 columns. Products: the matrix product of the kernel family, as in
// core/bias_gradient.cuh.
template <class Config, class Products>
struct MaxLogit {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using E = Element<T>;
  using Stage = typename Config::Stage;
  static constexpr int BLOCK_M = Config::BLOCK_M, BLOCK_N = Config::BLOCK_N;
  static constexpr int COLUMNS = Config::COLUMNS, MT = Config::ROW_TILES;
  using Scores = Accumulator<MT, BLOCK_N / 8>;
  using Work = MaxLogitWork<BLOCK_M, BLOCK_N>;

  const FwdParams& p;
  const Work& work;
  const E *q, *k;  // the block's first query, the sequence's first key
  const int rows;  // number of existing rows from the block's first row on
  const RowSpan keys;
  const uint32_t stages;
  const int warp_row0;
  const int steps;  // steps per key block

  __device__ __forceinline__ MaxLogit(const FwdParams& params, typename Config::Smem& smem,
                                      const FwdBlock& block, const Sequence& sequence,
                                      const Work& work_)
      : p(params),
        work(work_),
        q(head_begin<E>(p.q, block.batch, block.head_kv, block.head_in_group) +
          (sequence.q0 + block.row0) * p.q.row),
        k(head_begin<E>(p.k, block.batch, block.head_kv, 0) + sequence.k0 * p.k.row),
        rows(sequence.seqlen_q - block.row0),
        keys(Mask(p.mask, work.place).keys_that_exist(block.batch)),
        stages(shared_address(&smem)),
        warp_row0(static_cast<int>(threadIdx.x) / 32 * Config::ROWS),
        steps((p.head_dim + COLUMNS - 1) / COLUMNS) {}

  __device__ __forceinline__ uint32_t q_tile(int stage) const {
    return stages + stage * static_cast<int>(sizeof(Stage));
  }
  __device__ __forceinline__ uint32_t k_tile(int stage) const {
    return q_tile(stage) + static_cast<int>(offsetof(Stage, k));
  }

  // The copies of a step.
  struct Copies {
    OperandCopy<Config, BLOCK_M, COLUMNS> q;
    OperandCopy<Config, BLOCK_N, COLUMNS> k;
    int j, step;    // next step: its key block, and its index among the steps of this key block
    bool copies_q;  // whether the last step that fetch() started copies Q
  };

  // Starts the copies of step i.
  __device__ __forceinline__ void fetch(Copies& copies, int i, int stage) const {
    const int column = copies.step * COLUMNS, left = p.head_dim - column;
    const int key0 = work.blocks.key0(copies.j);
    copies.copies_q = i < Config::STAGES || Config::STAGES % steps != 0;
    if (copies.copies_q) {
      copies.q.fetch(q_tile(stage), q + column, p.q.row, {0, rows}, left);
    }
    copies.k.fetch(k_tile(stage), k + key0 * p.k.row + column, p.k.row,
                   {keys.first - key0, keys.end - key0}, left);
    if (++copies.step == steps) copies.step = 0, ++copies.j;
  }
  __device__ __forceinline__ void land(Copies& copies, int stage) const {
    if (copies.copies_q) copies.q.land(q_tile(stage));
    copies.k.land(k_tile(stage));
  }

  // Adds the products over the columns of one step to the scores of key block j.
  __device__ __forceinline__ void add(Scores& s, int j, int step, int stage) const {
    if (step == 0) {
      s.clear();
      if constexpr (sizeof(E) == 2) {
        add_bias<T, BeginWithBias>(s, p, BLOCK_M, warp_row0, work.blocks.key0(j));
      }
    }
    Products::multiply(s, q_tile(stage), warp_row0, k_tile(stage));
  }

  // Updates `top`, the largest score of each of the lane's rows, with the scores of key block j.
  __device__ __forceinline__ void compare(float (&top)[MT][2], Scores& s, int j) const {
    if (p.scores.has_score_mod || !work.blocks.is_full(j)) {
      modify_and_mask<sizeof(E) == 2 ? Tanh::FAST : Tanh::EXACT, T, false>(s, p, work, warp_row0,
                                                                           j);
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) top[m][i / 2] = larger<Target>(top[m][i / 2], s.x[m][n][i]);
  }

  // Returns the largest score, times the softmax's scale, of the lane's rows that exist.
  __device__ __forceinline__ float find_largest(const float (&top)[MT][2]) const {
    const int row = warp_row0 + static_cast<int>(threadIdx.x) % 32 / 4;
    float x = -INFINITY;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (row + m * 16 + h * 8 < rows) x = larger<Target>(x, top[m][h]);
      }
    return x * p.scores.scale;
  }
};

template <class Config, class Products>
__device__ __forceinline__ void find_max_logit(const MaxLogitParams& params) {
  using Kernel = MaxLogit<Config, Products>;
  constexpr int MT = Config::ROW_TILES;
  const FwdParams& p = params.p;
  const FwdBlock block(p, Config::BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (block.row0 >= sequence.seqlen_q) return;
  if (params.few_alone && !is_few_queries(sequence.seqlen_q, sequence.seqlen_k)) return;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const typename Kernel::Work work(p, block, sequence);
  const Kernel kernel(p, smem, block, sequence, work);

  float top[MT][2];
#pragma unroll
  for (int m = 0; m < MT; ++m) top[m][0] = top[m][1] = -INFINITY;
  typename Kernel::Scores s;
  typename Kernel::Copies copies;
  int j = copies.j = work.blocks.begin;  // index of the current key block
  int step = copies.step = 0;
  run_pipeline<typename Config::Target, Config::STAGES>(
      max(work.blocks.end - j, 0) * kernel.steps,
      [&](int i, int stage) { kernel.fetch(copies, i, stage); },
      [&](int stage) { kernel.land(copies, stage); },
      [&](int, int stage) {
        kernel.add(s, j, step, stage);
        if (++step < kernel.steps) return;
        kernel.compare(top, s, j);
        step = 0;
        ++j;
      });
  raise_max_logit<typename Config::Target>(params.max_logit + block.head, kernel.find_largest(top));
}

template <class Config>
cudaError_t launch_max_logit(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  MaxLogitParams all = *static_cast<const MaxLogitParams*>(params);
  return launch_in_order(entry, all.p, FwdGrid(all.p, Config::BLOCK_M), all, stream);
}

}  // namespace flash_dist

// dQ with recomputed S and dP, for calls that store no dS.
//
//   S = Q @ K.T   P = exp2(S - lse)   dP = dO @ V.T   dS = P (dP - delta)   dQ += dS @ K
//
// Grid      x = query tile, query head of the (batch, kv head) pairs.
// Block     SPLIT = 1: a warp owns ROWS queries over the whole head_dim. dS stays in its registers
//           as the A operand. SPLIT > 1: SPLIT warps share ROWS queries. Each computes dS for part
//           of the stage's keys, exchanges dS through shared memory, and accumulates part of the
//           columns.
// Shared    Q and dO (for the block's lifetime), STAGES stages of K and V.
#pragma once

#include "core/bias.cuh"
#include "core/block_iterators.cuh"
#include "core/bwd_load.cuh"
#include "core/dropout.cuh"
#include "core/ds_scale.h"
#include "core/mask.cuh"
#include "core/pipeline.cuh"
#include "core/scores.cuh"
#include "mma/bwd/config.h"
#include "mma/fragments.cuh"

namespace flash_dist {

template <class Config>
struct DqRecompute {
  using Target = typename Config::Target;
  using T = typename Config::T;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int BLOCK_N = Config::BLOCK_N;
  static constexpr int MT = Config::ROW_TILES;
  static constexpr int SPLIT = Config::SPLIT;
  static constexpr int SUB_N = Config::SUB_N;  // keys per pass
  static constexpr int NT = SUB_N / 8;
  using Scores = Accumulator<MT, NT>;
  using Sum = Accumulator<MT, HEAD_DIM / 8 / SPLIT>;
  using Statistics = float[MT][2];  // a value per row of the lane

  const BwdParams& p;
  typename Config::Smem& smem;
  const DqTiles<Config>& tiles;
  const DqBlock& block;
  const Sequence& sequence;
  const int& warp_row0;  // the warp's first query in the block
  const int& head;       // query head
  const Mask& mask;
  const KeyBlockIterator<BLOCK_M, BLOCK_N>& key_blocks;

  __device__ __forceinline__ void load_statistics(Statistics& lse, Statistics& delta) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t row = statistics_begin(p, block.batch, head, sequence.q0) + block.row0 +
                            warp_row0 + m * 16 + h * 8 + lane / 4;
        lse[m][h] = p.lse_log2[row];
        delta[m][h] = p.delta[row] * (1.0f / DS_SCALE<T>);
      }
  }

  // dQ += dS @ K for key tile j, which is in stage s.
  __device__ __forceinline__ void add(Sum& dq, const Statistics& lse, const Statistics& delta,
                                      float scale_log2, int j, int s) const {
    const int key0 = key_blocks.key0(j);
    const int code = key_blocks.is_full(j) ? TILE_FULL : key_blocks.code(j, warp_row0 / MASK_TILE);
    if (code == TILE_EMPTY) return;
    const int row0 = warp_row0;  // NOTE: a local copy keeps address computations out of the loop
    const auto a_q = Operand<HEAD_DIM>::a(tiles.q + row0 * HEAD_DIM * 2);
    const auto a_dout = Operand<HEAD_DIM_V>::a(tiles.dout + row0 * HEAD_DIM_V * 2);
#pragma unroll 1
    for (int sub = part() * SUB_N; sub < BLOCK_N; sub += SPLIT * SUB_N) {
      // S = Q @ K.T                                      [ROWS, SUB_N] per warp
      Scores ds;
      ds.clear();
      if (p.bias.data != nullptr) {
        add_bias<T, false, BeginWithBias, !Config::DROPS>(
            ds, p.bias, {block.batch, head, block.row0 + row0, key0 + sub}, p.seqlen_q, p.seqlen_k);
      }
      gemm_abt<Target, T, HEAD_DIM, Config::UNROLL>(ds, a_q, by_key<HEAD_DIM>(tiles.k(s)), sub);
      // dP = dO @ V.T                                    [ROWS, SUB_N]
      Scores dp;
      dp.clear();
      gemm_abt<Target, T, HEAD_DIM_V, Config::UNROLL>(dp, a_dout, by_key<HEAD_DIM_V>(tiles.v(s)),
                                                      sub);
      if constexpr (Config::DROPS) {
        const DropoutParams& dropout = dropout_of(p);
        drop(dp, dropout, {sequence_head(p, block.batch, head), block.row0 + row0, key0 + sub},
             dropout.scale);
      }
      modify_scores(ds, dp, delta, key0, sub, code);
      // dS = exp2(S * scale - lse) * (dP - delta)
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            float& x = ds.x[m][n][e];
            x = exp2_approx(fmaf(x, scale_log2, -lse[m][e / 2])) *
                ((dp.x[m][n][e] - delta[m][e / 2]) * DS_SCALE<T>);
          }
      // dQ += dS @ K                                     [ROWS, HEAD_DIM / SPLIT]
      if constexpr (SPLIT > 1) {
        multiply_in_team(dq, ds, s);
      } else {
#pragma unroll
        for (int k = 0; k < SUB_N / 16; ++k) {
          uint32_t rDs[MT][4];
          to_a_operand<Target, T>(rDs, ds, k);
          gemm_ab_step<Target, T, HEAD_DIM>(dq, rDs, Operand<HEAD_DIM>::b_trans(tiles.k(s)),
                                            sub + k * 16);
        }
      }
    }
  }

  // The warp stores dS of its keys in shared memory. Then each warp of the team reads dS of all
  // keys, for its own columns.
  __device__ __forceinline__ void multiply_in_team(Sum& dq, const Scores& ds, int s) const {
    constexpr int BLOCKS = BLOCK_N / 16;
    const int team = threadIdx.x / 32 / SPLIT;
    const uint32_t sDs = shared_address(smem.exchange.ds) + team * MT * BLOCKS * FRAGMENT_BYTES +
                         threadIdx.x % 32 * 16;
    put_fragments<Target, T, BLOCKS>(sDs, ds, part());
    meet<Config>(team);  // all parts are stored; they are read before the stage's barrier
    const auto b_k = share(Operand<HEAD_DIM>::b_trans(tiles.k(s)), part());
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
      uint32_t rDs[MT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m) get_fragment(rDs[m], sDs + (m * BLOCKS + k) * FRAGMENT_BYTES);
      gemm_ab_step<Target, T, HEAD_DIM, SPLIT>(dq, rDs, b_k, k * 16);
    }
  }

  // Applies soft cap, ALiBi and mask to the scores of the keys from key0 + sub on. A soft cap also
  // changes dp (apply_score_mod_to_both()).
  __device__ __forceinline__ void modify_scores(Scores& scores, Scores& dp, const Statistics& delta,
                                                int key0, int sub, int code) const {
    if (p.scores.has_score_mod) {
      const int row0 = block.row0 + warp_row0 + mask.seqlen_k - mask.seqlen_q;
      apply_score_mod_to_both<Config::DROPS ? Tanh::NONE : Tanh::FAST>(
          scores, dp, delta, p.scores,
          {alibi_slope(p.scores, block.batch, head), row0, key0 + sub});
    }
    if (code != TILE_FULL) apply_mask(scores, mask, block.row0 + warp_row0, key0 + sub, code);
  }

  // Rounds dQ and writes it through the warp's rows of Q in shared memory.
  __device__ __forceinline__ void store(Sum& dq) const {
    dq.scale(gradient_scale<T>(p.softmax_scale));
    const DqBlock again(p, BLOCK_M);
    const Sequence rows(p, again.batch);
    const int row0 = again.row0 + warp_row0;
    store_sum<Config, HEAD_DIM>(dq, tiles.q + warp_row0 * HEAD_DIM * 2, part(),
                                head_begin(p.dq, again.batch, again.head_kv, again.head_in_group) +
                                    static_cast<int64_t>(rows.q0 + row0) * p.dq.row,
                                p.dq.row, rows.seqlen_q - row0, p.head_dim);
  }

 private:
  // Returns the index of this warp among the SPLIT warps that share its queries.
  __device__ __forceinline__ static int part() { return SPLIT == 1 ? 0 : threadIdx.x / 32 % SPLIT; }
  // The rows of K or V as operand B.
  template <int COLUMNS>
  __device__ __forceinline__ static Operand<COLUMNS> by_key(uint32_t tile) {
    return NT == 1 ? Operand<COLUMNS>::b_8(tile) : Operand<COLUMNS>::b(tile);
  }
};

template <class Config>
__device__ __forceinline__ void dq_recompute_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using Kernel = DqRecompute<Config>;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DqBlock block(p, Config::BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (block.row0 >= sequence.seqlen_q) return;
  const DqTiles<Config> tiles(smem);
  const int warp_row0 = threadIdx.x / 32 / Config::SPLIT * Config::ROWS;
  const int head = block.head_kv * p.group + block.head_in_group;
  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, head));
  const KeyBlockIterator<Config::BLOCK_M, Config::BLOCK_N> key_blocks(mask, block.row0);
  const Kernel kernel{p, smem, tiles, block, sequence, warp_row0, head, mask, key_blocks};
  KeyCopies<Config> copies(p, block, sequence, mask.keys_that_exist(block.batch));
  typename Kernel::Statistics lse, delta;
  kernel.load_statistics(lse, delta);
  typename Kernel::Sum dq;
  dq.clear();
  const float scale_log2 = p.scores.scale * LOG2_E;
  load_queries<Config>(p, block, sequence, tiles);
  run_pipeline<Target, Config::STAGES>(
      key_blocks.end - key_blocks.begin,
      [&](int i, int s) { copies.fetch(p, tiles, key_blocks.key0(key_blocks.begin + i), s); },
      [&](int s) { copies.land(tiles, s); },
      [&](int i, int s) { kernel.add(dq, lse, delta, scale_log2, key_blocks.begin + i, s); });
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  __syncthreads();  // without key tiles the copy of Q may still be in flight
  kernel.store(dq);
}

}  // namespace flash_dist

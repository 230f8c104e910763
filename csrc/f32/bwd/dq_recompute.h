// dQ in fp32 with recomputed S and dP, and the normalizers of P (normalizer.cuh) for dK/dV.
//
//   S = Q @ K.T   P = exp2(S - lse)   dP = dO @ V.T   dS = P (dP - delta)   dQ += dS @ K
//   at the end: dQ *= normalizer
//
// Grid      x = query tile, query head of the (batch, kv head) pairs.
// Block     WARPS warps. SPLIT warps share 16 queries; each sums S and dP over a slice of the
//           columns and owns that slice of dQ. dS stays in registers.
// Shared    Q and dO (for the block's lifetime), STAGES stages of K and V, the slices' partial sums
//           of S or dP.
#pragma once

#include "core/bias.cuh"
#include "core/block_iterators.cuh"
#include "core/bwd_load.cuh"
#include "core/dropout.cuh"
#include "core/mask.cuh"
#include "core/pipeline.cuh"
#include "core/scores.cuh"
#include "core/softmax.cuh"
#include "f32/bwd/config.h"
#include "f32/bwd/normalizer.cuh"
#include "f32/fragments.cuh"
#include "f32/product.cuh"
#include "ptx/convert.cuh"

namespace flash_dist {

template <class Config>
struct F32DqRecompute {
  using Product = flash_dist::Product<typename Config::Target, typename Config::T>;
  using Rows = FloatRows<Config::HEAD_DIM>;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int BLOCK_N = Config::BLOCK_N;
  static constexpr int SLICE = Config::SLICE;
  using Warp = WarpPlace<Config>;
  using Scores = Accumulator<1, BLOCK_N / 8>;
  using Sum = Accumulator<1, SLICE / 8>;
  using Statistics = float[2];  // for the lane's rows lane / 4 and lane / 4 + 8

  const BwdParams& p;
  const DqTiles<Config>& tiles;
  const uint32_t& exchange;  // address of the shared memory that sum_slices() uses
  const DqBlock& block;
  const Sequence& sequence;
  const int& head;  // query head
  const Mask& mask;
  const KeyBlockIterator<BLOCK_M, BLOCK_N>& key_blocks;

  __device__ __forceinline__ void load_statistics(Statistics& lse, Statistics& delta) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Warp warp;
      const int64_t row = statistics_begin(p, block.batch, head, sequence.q0) + block.row0 +
                          warp.row0() + h * 8 + warp.lane / 4;
      lse[h] = p.lse_log2[row];
      delta[h] = p.delta[row];
    }
  }

  // Adds the contribution of key tile j, which is in stage s, to dQ, and its P to the lane's row
  // sums.
  __device__ __forceinline__ void add(Sum& dq, Statistics& row_sum, const Statistics& lse,
                                      const Statistics& delta, float scale_log2, int j,
                                      int s) const {
    const Warp warp;
    const int code =
        key_blocks.is_full(j) ? TILE_FULL : key_blocks.code(j, warp.row0() / MASK_TILE);
    if (code == TILE_EMPTY) return;  // all warps that share these queries return
    const uint32_t k_slice = Rows::at(tiles.k(s), 0, warp.column0());

    // S = Q @ K.T                                        [16, BLOCK_N] per warp
    Scores ds;
    ds.clear();
    Product::template scores<HEAD_DIM, SLICE, Config::UNROLL, Queries::A>(
        ds, Rows::at(tiles.q, warp.row0(), warp.column0()), k_slice);
    sum_slices(ds, warp, exchange);
    // dP = dO @ V.T                                      [16, BLOCK_N]
    Scores dp;
    dp.clear();
    Product::template abt<HEAD_DIM, SLICE, Config::UNROLL, Queries::A>(
        dp, Rows::at(tiles.dout, warp.row0(), warp.column0()),
        Rows::at(tiles.v(s), 0, warp.column0()));
    slices_done(warp);
    sum_slices(dp, warp, exchange);
    if constexpr (Config::DROPS) {
      const DropoutParams& dropout = dropout_of(p);
      const DropoutPlace at{sequence_head(p, block.batch, head), block.row0 + warp.row0(),
                            key_blocks.key0(j)};
      drop(dp, dropout, at, dropout.scale);
    }
    modify_scores(ds, dp, delta, warp, j, code);
    // P = exp2(S * scale - lse), dS = P * (dP - delta)
    Statistics tile_sum = {};
#pragma unroll
    for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float weight = exp2_approx(fmaf(ds.x[0][n][x], scale_log2, -lse[x / 2]));
        tile_sum[x / 2] += weight;
        ds.x[0][n][x] = weight * (dp.x[0][n][x] - delta[x / 2]);
      }
    row_sum[0] += tile_sum[0];
    row_sum[1] += tile_sum[1];
    // dQ += dS @ K                                       [16, SLICE]
    Product::template ab<HEAD_DIM>(dq, ds, k_slice);
  }

  // Writes the normalizers, and dQ multiplied by them and by softmax_scale.
  __device__ __forceinline__ void store(Sum& dq, const Statistics& row_sum,
                                        const Statistics& lse) const {
    const Warp warp;
    const DqBlock again(p, BLOCK_M);
    const Sequence rows(p, again.batch);
    const int row0 = again.row0 + warp.row0();
    float* normalizers =
        p.normalizers +
        statistics_begin(p, again.batch, again.head_kv * p.group + again.head_in_group, rows.q0) +
        row0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float factor = normalizer(quad_sum(row_sum[h]), lse[h]);
      if (warp.slice == 0 && warp.lane % 4 == 0) normalizers[h * 8 + warp.lane / 4] = factor;
#pragma unroll
      for (int n = 0; n < SLICE / 8; ++n) {
        dq.x[0][n][2 * h] *= factor;
        dq.x[0][n][2 * h + 1] *= factor;
      }
    }
    store_floats(dq, p.softmax_scale,
                 head_begin<float>(p.dq, again.batch, again.head_kv, again.head_in_group) +
                     static_cast<int64_t>(rows.q0 + row0) * p.dq.row + warp.column0(),
                 p.dq.row, rows.seqlen_q - row0, p.head_dim - warp.column0());
  }

 private:
  // Applies soft cap, ALiBi, bias and mask to the scores, and the derivative of the soft cap to dP.
  __device__ __forceinline__ void modify_scores(Scores& scores, Scores& dp, const Statistics& delta,
                                                const Warp& warp, int j, int code) const {
    if (p.scores.has_score_mod) {
      const int row0 = block.row0 + warp.row0() + mask.seqlen_k - mask.seqlen_q;
      apply_score_mod_to_both<Config::DROPS ? Tanh::NONE : Tanh::EXACT>(
          scores, dp, {{delta[0], delta[1]}}, p.scores,
          {alibi_slope(p.scores, block.batch, head), row0, key_blocks.key0(j)});
      add_bias<typename Config::T, false, AddBias, !Config::DROPS>(
          scores, p.bias, {block.batch, head, block.row0 + warp.row0(), key_blocks.key0(j)},
          p.seqlen_q, p.seqlen_k);
    }
    if (code != TILE_FULL)
      apply_mask(scores, mask, block.row0 + warp.row0(), key_blocks.key0(j), code);
  }
};

template <class Config>
__device__ __forceinline__ void f32_dq_recompute_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using Kernel = F32DqRecompute<Config>;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DqBlock block(p, Config::BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (block.row0 >= sequence.seqlen_q) return;
  const DqTiles<Config> tiles(smem);
  const uint32_t exchange = shared_address(smem.exchange);
  const int head = block.head_kv * p.group + block.head_in_group;
  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, head));
  const KeyBlockIterator<Config::BLOCK_M, Config::BLOCK_N> key_blocks(mask, block.row0);
  const Kernel kernel{p, tiles, exchange, block, sequence, head, mask, key_blocks};
  KeyCopies<Config> copies(p, block, sequence, mask.keys_that_exist(block.batch));
  typename Kernel::Statistics lse, delta;
  typename Kernel::Statistics row_sum = {};  // row sums of P over this lane's columns
  kernel.load_statistics(lse, delta);
  typename Kernel::Sum dq;
  dq.clear();
  const float scale_log2 = p.scores.scale * LOG2_E;
  load_queries<Config>(p, block, sequence, tiles);
  run_pipeline<Target, Config::STAGES>(
      key_blocks.end - key_blocks.begin,
      [&](int i, int s) { copies.fetch(p, tiles, key_blocks.key0(key_blocks.begin + i), s); },
      [&](int s) { copies.land(tiles, s); },
      [&](int i, int s) {
        kernel.add(dq, row_sum, lse, delta, scale_log2, key_blocks.begin + i, s);
      });
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  kernel.store(dq, row_sum, lse);
}

}  // namespace flash_dist

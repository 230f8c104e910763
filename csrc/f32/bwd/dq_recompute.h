// dQ in fp32, with S and dP computed again, and the normalizers of P (normalizer.cuh) for dK/dV.
//
//   S = Q @ K.T   P = exp2(S - lse)   dP = dO @ V.T   dS = P (dP - delta)   dQ += dS @ K
//   at the end: dQ *= normalizer
//
// Grid      x = query tile, query head of the units.
// Block     WARPS warps; SPLIT of them share 16 queries, each sums S and dP over a slice of the
//           columns and owns that slice of dQ. dS stays in registers.
// Shared    Q and dO (for the whole life of the block), STAGES stages of K and V, the slices' parts
//           of S or dP.
#pragma once

#include "core/apply_mask.cuh"
#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
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
__device__ __forceinline__ void f32_dq_recompute_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using Product = flash_dist::Product<Target, typename Config::T>;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int SLICE = Config::SLICE;
  constexpr int NT = BLOCK_N / 8;
  using Rows = FloatRows<HEAD_DIM>;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sQ = shared_address(smem.q);
  const uint32_t sDout = shared_address(smem.dout);
  using Stage = typename Config::Stage;
  const uint32_t sStage = shared_address(&smem.stage[0]);
  const auto sK = [&](int s) { return sStage + s * static_cast<int>(sizeof(Stage)); };
  const auto sV = [&](int s) { return sK(s) + static_cast<int>(offsetof(Stage, v)); };
  const uint32_t sExchange = shared_address(smem.exchange);

  const DqBlock block(p, BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (block.row0 >= sequence.seqlen_q) return;
  const int head = block.head_kv * p.group + block.member;
  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, head));
  const KeyBlockIterator<BLOCK_M, BLOCK_N> walk(mask, block.row0);
  const RowSpan keys = mask.keys_that_exist(block.batch);
  const float* gK = float_head_begin(p.k, block.batch, block.head_kv, 0) +
                    static_cast<int64_t>(sequence.k0) * p.k.row;
  const float* gV = float_head_begin(p.v, block.batch, block.head_kv, 0) +
                    static_cast<int64_t>(sequence.k0) * p.v.row;

  float lse[2], delta[2];
  float sum[2] = {};  // of P, over this lane's columns
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const WarpPlace<Config> warp;
    const int64_t row = statistics_begin(p, block.batch, head, sequence.q0) + block.row0 +
                        warp.row0() + h * 8 + warp.lane / 4;
    lse[h] = p.lse_log2[row];
    delta[h] = p.delta[row];
  }

  FloatTileCopy<Target, BLOCK_N, HEAD_DIM, Config::THREADS> copy_k, copy_v;
  const auto fetch = [&](int i, int s) {
    const int key0 = walk.key0(walk.begin + i);
    const RowSpan here{keys.first - key0, keys.end - key0};
    copy_k.fetch(sK(s), gK + key0 * p.k.row, p.k.row, here, p.head_dim);
    copy_v.fetch(sV(s), gV + key0 * p.v.row, p.v.row, here, p.head_dim_v);
  };
  const auto land = [&](int s) {
    copy_k.land(sK(s));
    copy_v.land(sV(s));
  };

  Accumulator<1, SLICE / 8> dq;
  dq.clear();
  const float scale_log2 = p.scores.scale * LOG2_E;
  const auto compute = [&](int i, int s) {
    const WarpPlace<Config> warp;
    const int j = walk.begin + i;
    const int code = walk.is_full(j) ? TILE_FULL : walk.code(j, warp.row0() / MASK_TILE);
    if (code == TILE_EMPTY) return;  // for all warps that share these queries
    const uint32_t k_slice = Rows::at(sK(s), 0, warp.column0());

    // S = Q @ K.T                                        [16, BLOCK_N] per warp
    Accumulator<1, NT> ds;
    ds.clear();
    Product::template scores<HEAD_DIM, SLICE, Config::UNROLL, Queries::A>(
        ds, Rows::at(sQ, warp.row0(), warp.column0()), k_slice);
    sum_slices(ds, warp, sExchange);
    // dP = dO @ V.T
    Accumulator<1, NT> dp;
    dp.clear();
    Product::template abt<HEAD_DIM, SLICE, Config::UNROLL, Queries::A>(
        dp, Rows::at(sDout, warp.row0(), warp.column0()), Rows::at(sV(s), 0, warp.column0()));
    slices_done(warp);
    sum_slices(dp, warp, sExchange);
    if (p.scores.has_score_mod) {
      const int row0 = block.row0 + warp.row0() + mask.seqlen_k - mask.seqlen_q;
      apply_score_mod_to_both<Tanh::EXACT>(
          ds, dp, {{delta[0], delta[1]}}, p.scores,
          {alibi_slope(p.scores, block.batch, head), row0, walk.key0(j)});
    }
    if (code != TILE_FULL) apply_mask(ds, mask, block.row0 + warp.row0(), walk.key0(j), code);
    // P = exp2(S * scale - lse), dS = P * (dP - delta)
    float tile_sum[2] = {};
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float weight = exp2_approx(fmaf(ds.x[0][n][x], scale_log2, -lse[x / 2]));
        tile_sum[x / 2] += weight;
        ds.x[0][n][x] = weight * (dp.x[0][n][x] - delta[x / 2]);
      }
    sum[0] += tile_sum[0];
    sum[1] += tile_sum[1];
    // dQ += dS @ K                                       [16, SLICE]
    Product::template ab<HEAD_DIM>(dq, ds, k_slice);
  };

  {
    const RowSpan rows{0, sequence.seqlen_q - block.row0};
    const int64_t row0 = sequence.q0 + block.row0;
    FloatTileCopy<Target, BLOCK_M, HEAD_DIM, Config::THREADS> copy;
    copy.fetch(sQ, float_head_begin(p.q, block.batch, block.head_kv, block.member) + row0 * p.q.row,
               p.q.row, rows, p.head_dim);
    copy.land(sQ);
    copy.fetch(
        sDout,
        float_head_begin(p.dout, block.batch, block.head_kv, block.member) + row0 * p.dout.row,
        p.dout.row, rows, p.head_dim_v);
    copy.land(sDout);
  }
  run_pipeline<Target, Config::STAGES>(walk.end - walk.begin, fetch, land, compute);
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();

  const WarpPlace<Config> warp;
  const DqBlock again(p, BLOCK_M);
  const Sequence rows(p, again.batch);
  const int row0 = again.row0 + warp.row0();
  float* normalizers =
      p.normalizers +
      statistics_begin(p, again.batch, again.head_kv * p.group + again.member, rows.q0) + row0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = normalizer(quad_sum(sum[h]), lse[h]);
    if (warp.slice == 0 && warp.lane % 4 == 0) normalizers[h * 8 + warp.lane / 4] = factor;
#pragma unroll
    for (int n = 0; n < SLICE / 8; ++n) {
      dq.x[0][n][2 * h] *= factor;
      dq.x[0][n][2 * h + 1] *= factor;
    }
  }
  store_floats(dq, p.softmax_scale,
               float_head_begin(p.dq, again.batch, again.head_kv, again.member) +
                   static_cast<int64_t>(rows.q0 + row0) * p.dq.row + warp.column0(),
               p.dq.row, rows.seqlen_q - row0, p.head_dim - warp.column0());
}

}  // namespace flash_dist

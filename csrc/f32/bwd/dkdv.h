// dK and dV in fp32; dS is never stored. No atomics: a block owns its keys.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse) * normalizer
//                                                           dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// Grid      x = key tile, (batch, kv head) unit of the chunk, group split.
// Block     WARPS warps; SPLIT of them share 16 keys, each sums S^T and dP^T over a slice of the
//           columns and owns that slice of dK and dV. P^T and dS^T stay in registers.
// Shared    K and V (for the whole life of the block), STAGES stages of Q, dO, lse, delta and the
//           normalizers (of dq_recompute.h), the slices' parts of S^T or dP^T.
// Pipeline  the query tiles of every query head of the split, in ascending order: this is the order
//           of summation.
#pragma once

#include "core/apply_mask.cuh"
#include "core/blocks.cuh"
#include "core/pipeline.cuh"
#include "core/scores.cuh"
#include "core/statistics.cuh"
#include "f32/bwd/config.h"
#include "f32/bwd/normalizer.cuh"
#include "f32/fragments.cuh"
#include "f32/product.cuh"
#include "ptx/convert.cuh"

namespace flash_dist {

template <class Config>
__device__ __forceinline__ void f32_dkdv_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using Product = flash_dist::Product<Target, typename Config::T>;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int SLICE = Config::SLICE;
  constexpr int NT = BLOCK_M / 8;
  using Rows = FloatRows<HEAD_DIM>;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sK = shared_address(smem.k);
  const uint32_t sV = shared_address(smem.v);
  const uint32_t sStage = shared_address(&smem.stage[0]);
  using Stage = typename Config::Stage;
  const auto sQ = [&](int s) { return sStage + s * static_cast<int>(sizeof(Stage)); };
  const auto sDout = [&](int s) { return sQ(s) + static_cast<int>(offsetof(Stage, dout)); };
  const auto sLse = [&](int s) { return sQ(s) + static_cast<int>(offsetof(Stage, lse_log2)); };
  const auto sDelta = [&](int s) { return sQ(s) + static_cast<int>(offsetof(Stage, delta)); };
  const auto sNormalizers = [&](int s) {
    return sQ(s) + static_cast<int>(offsetof(Stage, normalizers));
  };
  const uint32_t sExchange = shared_address(smem.exchange);

  F32DkdvWork& work = smem.work;
  {
    const DkdvBlock block(p, BLOCK_N);
    const Sequence sequence(p, block.batch);
    if (block.key0 >= sequence.seqlen_k) return;
    const int members = p.group / p.group_split;
    const int head = block.head_kv * p.group;
    F32DkdvWork mine;
    mine.q = float_head_begin(p.q, block.batch, block.head_kv, 0) + sequence.q0 * p.q.row;
    mine.dout = float_head_begin(p.dout, block.batch, block.head_kv, 0) + sequence.q0 * p.dout.row;
    mine.statistics = statistics_begin(p, block.batch, head, sequence.q0);
    mine.batch = block.batch;
    mine.head = head;
    mine.members_begin = block.split * members;
    mine.members_end = block.split * members + members;
    mine.seqlen_q = sequence.seqlen_q;
    mine.seqlen_k = sequence.seqlen_k;
    mine.key0 = block.key0;
    if (threadIdx.x == 0) {
      work = mine;
      smem.cursor.start(p, mine);
      if (!smem.cursor.at_end(mine)) smem.items[0] = smem.cursor.item(p, mine);
    }

    const RowSpan keys = mine.mask(p, 0).keys_that_exist(block.batch);
    const RowSpan here{keys.first - block.key0, keys.end - block.key0};
    const int64_t row0 = sequence.k0 + block.key0;
    FloatTileCopy<Target, BLOCK_N, HEAD_DIM, Config::THREADS> copy;
    copy.fetch(sK, float_head_begin(p.k, block.batch, block.head_kv, 0) + row0 * p.k.row, p.k.row,
               here, p.head_dim);
    copy.land(sK);
    copy.fetch(sV, float_head_begin(p.v, block.batch, block.head_kv, 0) + row0 * p.v.row, p.v.row,
               here, p.head_dim_v);
    copy.land(sV);
    __syncthreads();  // work and item 0 are there
  }

  FloatTileCopy<Target, BLOCK_M, HEAD_DIM, Config::THREADS> copy_q, copy_dout;
  StatCopy<Target, BLOCK_M> copy_stats;
  NormalizerCopy<Target, BLOCK_M> copy_normalizers;
  const auto fetch = [&](int i, int s) {
    const int row0 = smem.items[i % Config::ITEMS].row0;
    const int member = smem.items[i % Config::ITEMS].member;
    const RowSpan rows{0, max(work.seqlen_q - row0, 0)};  // the last stages may lie beyond the end
    copy_q.fetch(sQ(s), work.q + member * p.q.head_group + row0 * p.q.row, p.q.row, rows,
                 p.head_dim);
    copy_dout.fetch(sDout(s), work.dout + member * p.dout.head_group + row0 * p.dout.row,
                    p.dout.row, rows, p.head_dim_v);
    const int64_t row = work.statistics + static_cast<int64_t>(member) * p.rows_padded + row0;
    copy_stats.fetch(sLse(s), p.lse_log2 + row, p.delta + row);
    copy_normalizers.fetch(sNormalizers(s), p.normalizers + row, rows.end);
    if (threadIdx.x == 0) {
      smem.cursor.next(p, work);
      if (!smem.cursor.at_end(work)) {
        smem.items[(i + 1) % Config::ITEMS] = smem.cursor.item(p, work);
      }
    }
    __syncwarp();
  };
  const auto land = [&](int s) {
    copy_q.land(sQ(s));
    copy_dout.land(sDout(s));
    copy_stats.land(sLse(s));
    copy_normalizers.land(sNormalizers(s));
  };

  Accumulator<1, SLICE / 8> dk, dv;
  dk.clear();
  dv.clear();

  const auto compute = [&](int i, int s) {
    const F32DkdvItem& item = smem.items[i % Config::ITEMS];
    const WarpPlace<Config> warp;
    const int code = item.code[warp.row0() / MASK_TILE];
    if (code == TILE_EMPTY) return;  // for all warps that share these keys
    const uint32_t q_slice = Rows::at(sQ(s), 0, warp.column0());
    const uint32_t dout_slice = Rows::at(sDout(s), 0, warp.column0());

    // S^T = K @ Q.T                                      [16, BLOCK_M] per warp
    Accumulator<1, NT> pt;
    pt.clear();
    Product::template scores<HEAD_DIM, SLICE, Config::UNROLL, Queries::B>(
        pt, Rows::at(sK, warp.row0(), warp.column0()), q_slice);
    sum_slices(pt, warp, sExchange);
    const auto place = [&] {
      return ScorePlace{alibi_slope(p.scores, work.batch, work.head + item.member),
                        item.row0 + work.seqlen_k - work.seqlen_q, work.key0 + warp.row0()};
    };
    if (p.scores.has_score_mod) apply_score_mod<Tanh::EXACT, true>(pt, p.scores, place());
    if (code != TILE_FULL) {
      apply_mask_transposed(pt, work.mask(p, item.member), item.row0, work.key0 + warp.row0(),
                            code);
    }
    // P^T = exp2(S^T * scale - lse) * normalizer
    const float scale_log2 = p.scores.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 lse = load_shared_8(sLse(s) + (n * 8 + (warp.lane % 4) * 2) * 4);
      const float2 factor = load_shared_8(sNormalizers(s) + (n * 8 + (warp.lane % 4) * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = pt.x[0][n][i];
        x = exp2_approx(fmaf(x, scale_log2, -(i % 2 == 0 ? lse.x : lse.y))) *
            (i % 2 == 0 ? factor.x : factor.y);
      }
    }
    // dV += P^T @ dO                                     [16, SLICE]
    Product::template ab<HEAD_DIM>(dv, pt, dout_slice);
    // dP^T = V @ dO.T                                    [16, BLOCK_M]
    Accumulator<1, NT> dst;
    dst.clear();
    Product::template abt<HEAD_DIM, SLICE, Config::UNROLL, Queries::B>(
        dst, Rows::at(sV, warp.row0(), warp.column0()), dout_slice);
    slices_done(warp);
    sum_slices(dst, warp, sExchange);
    // dS^T = P^T * (dP^T - delta)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 delta = load_shared_8(sDelta(s) + (n * 8 + (warp.lane % 4) * 2) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = dst.x[0][n][i];
        x = pt.x[0][n][i] * (x - (i % 2 == 0 ? delta.x : delta.y));
      }
    }
    if (p.scores.softcap != 0.0f && p.scores.softcap < PRECISE_CAP) {
      // S^T again, in the place of P^T: lse and P^T tell too little of a small cap's tanh
      pt.clear();
      Product::template scores<HEAD_DIM, SLICE, Config::UNROLL, Queries::B>(
          pt, Rows::at(sK, warp.row0(), warp.column0()), q_slice);
      slices_done(warp);
      sum_slices(pt, warp, sExchange);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float t = tanhf(pt.x[0][n][i] * p.scores.scale_inside);
          float& x = dst.x[0][n][i];
          if (x != 0.0f) x *= fmaf(-t, t, 1.0f);  // else hidden, S may be anything
        }
    } else if (p.scores.softcap != 0.0f) {
      apply_score_mod_derivative(dst, pt, p.scores, place(), [&](int n) {
        return load_shared_8(sLse(s) + (n * 8 + (warp.lane % 4) * 2) * 4);
      });
    }
    // dK += dS^T @ Q                                     [16, SLICE]
    Product::template ab<HEAD_DIM>(dk, dst, q_slice);
  };

  run_pipeline<Target, Config::STAGES>(decltype(smem.cursor)::count(p, work), fetch, land, compute);
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();

  const WarpPlace<Config> warp;
  const DkdvBlock again(p, BLOCK_N);
  const Sequence sequence(p, again.batch);
  const int row0 = again.key0 + warp.row0();
  const int limit = sequence.seqlen_k - row0;
  const int column0 = warp.column0();
  if (p.group_split > 1) {
    const int64_t units = static_cast<int64_t>(p.batch) * p.num_heads_kv;
    const int64_t row = (again.split * units + p.unit_begin + again.unit) * p.seqlen_k + row0;
    store_floats(dk, 1.0f, p.dk_partial + row * HEAD_DIM + column0, HEAD_DIM, limit, SLICE);
    store_floats(dv, 1.0f, p.dv_partial + row * HEAD_DIM + column0, HEAD_DIM, limit, SLICE);
  } else {
    const int64_t row = sequence.k0 + row0;
    store_floats(dk, p.softmax_scale,
                 float_head_begin(p.dk, again.batch, again.head_kv, 0) + row * p.dk.row + column0,
                 p.dk.row, limit, p.head_dim - column0);
    store_floats(dv, 1.0f,
                 float_head_begin(p.dv, again.batch, again.head_kv, 0) + row * p.dv.row + column0,
                 p.dv.row, limit, p.head_dim_v - column0);
  }
}

}  // namespace flash_dist

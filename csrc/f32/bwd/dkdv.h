// dK and dV in fp32. dS is never stored. No atomics: a block owns its keys.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse) * normalizer
//                                                           dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// Grid      x = key tile, (batch, kv head) pair of the chunk, group split.
// Block     WARPS warps. SPLIT warps share 16 keys; each sums S^T and dP^T over a slice of the
//           columns and owns that slice of dK and dV. P^T and dS^T stay in registers.
// Shared    K and V (for the block's lifetime), STAGES stages of Q, dO, lse, delta and the
//           normalizers (of dq_recompute.h), the slices' partial sums of S^T or dP^T.
// Pipeline  The query tiles of every query head of the split, in ascending order, which is the
//           order of summation.
#pragma once

#include "core/bias.cuh"
#include "core/bwd_load.cuh"
#include "core/dropout.cuh"
#include "core/mask.cuh"
#include "core/pipeline.cuh"
#include "core/scores.cuh"
#include "f32/bwd/config.h"
#include "f32/bwd/normalizer.cuh"
#include "f32/fragments.cuh"
#include "f32/product.cuh"
#include "ptx/convert.cuh"

namespace flash_dist {

template <class Config>
struct F32Dkdv {
  using Target = typename Config::Target;
  using Product = flash_dist::Product<Target, typename Config::T>;
  using Rows = FloatRows<Config::HEAD_DIM>;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int BLOCK_N = Config::BLOCK_N;
  static constexpr int SLICE = Config::SLICE;
  static constexpr int NT = BLOCK_M / 8;
  using Warp = WarpPlace<Config>;
  using Scores = Accumulator<1, NT>;  // the warp's keys x a stage of queries
  using Sum = Accumulator<1, SLICE / 8>;

  const BwdParams& p;
  typename Config::Smem& smem;
  const DkdvTiles<Config> tiles;
  F32DkdvWork& work;

  __device__ __forceinline__ F32Dkdv(const BwdParams& params, typename Config::Smem& shared)
      : p(params), smem(shared), tiles(shared), work(shared.work) {}

  // Stores the block's work and first item in shared memory, and starts the copies of K and V.
  __device__ __forceinline__ void start(const DkdvBlock& block, const Sequence& sequence) const {
    const int heads_per_split = p.group / p.group_split;
    const int head = block.head_kv * p.group;
    F32DkdvWork mine;
    mine.q = head_begin<float>(p.q, block.batch, block.head_kv, 0) + sequence.q0 * p.q.row;
    mine.dout = head_begin<float>(p.dout, block.batch, block.head_kv, 0) + sequence.q0 * p.dout.row;
    mine.statistics = statistics_begin(p, block.batch, head, sequence.q0);
    mine.batch = block.batch;
    mine.head = head;
    mine.group_heads_begin = block.split * heads_per_split;
    mine.group_heads_end = block.split * heads_per_split + heads_per_split;
    mine.seqlen_q = sequence.seqlen_q;
    mine.seqlen_k = sequence.seqlen_k;
    mine.key0 = block.key0;
    if (threadIdx.x == 0) {
      work = mine;
      smem.cursor.start(p, mine);
      if (!smem.cursor.at_end(mine)) smem.items[0] = smem.cursor.item(p, mine);
    }
    load_keys<Config>(p, block, sequence, mine.mask(p, 0).keys_that_exist(block.batch), tiles);
    __syncthreads();  // work and item 0 are stored
  }

  // Starts the copies of item i into stage s, and prepares item i + 1.
  __device__ __forceinline__ void fetch(QueryCopies<Config>& queries,
                                        NormalizerCopy<Target, BLOCK_M>& normalizers, int i,
                                        int s) const {
    const int row0 = item(i).row0;
    const int head_in_group = item(i).head_in_group;
    const RowSpan rows{0, max(work.seqlen_q - row0, 0)};  // row0 may be past the last query
    const int64_t row = queries.fetch(p, work, tiles, row0, head_in_group, rows, s);
    normalizers.fetch(normalizers_of(s), p.normalizers + row, rows.end);
    if (threadIdx.x == 0) {
      smem.cursor.next(p, work);
      if (!smem.cursor.at_end(work)) item(i + 1) = smem.cursor.item(p, work);
    }
    __syncwarp();
  }

  // Adds the contribution of item i, which is in stage s, to dK and dV.
  __device__ __forceinline__ void add(Sum& dk, Sum& dv, int i, int s) const {
    const F32DkdvItem& item = this->item(i);
    const Warp warp;
    const int code = item.code[warp.row0() / MASK_TILE];
    if (code == TILE_EMPTY) return;  // all warps that share these keys return
    const uint32_t q_slice = Rows::at(tiles.q(s), 0, warp.column0());
    const uint32_t dout_slice = Rows::at(tiles.dout(s), 0, warp.column0());

    // S^T = K @ Q.T                                      [16, BLOCK_M] per warp
    Scores pt;
    multiply_qk(pt, warp, q_slice);
    sum_slices(pt, warp, sExchange());
    // P^T = exp2(S^T * scale - lse) * normalizer
    exponentiate(pt, item, warp, s, code);
    // dV += P^T @ dO                                     [16, SLICE]
    multiply_weights(dv, pt, item, warp, dout_slice);
    // dP^T = V @ dO.T                                    [16, BLOCK_M]
    Scores dst;
    dst.clear();
    Product::template abt<HEAD_DIM, SLICE, Config::UNROLL, Queries::B>(
        dst, Rows::at(tiles.v, warp.row0(), warp.column0()), dout_slice);
    slices_done(warp);
    sum_slices(dst, warp, sExchange());
    if constexpr (Config::DROPS) {
      const DropoutParams& dropout = dropout_of(p);
      drop<true>(dst, dropout, dropout_place(item, warp), dropout.scale);
    }
    // dS^T = P^T * (dP^T - delta)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 delta = statistic(tiles.delta(s), warp, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = dst.x[0][n][i];
        x = pt.x[0][n][i] * (x - (i % 2 == 0 ? delta.x : delta.y));
      }
    }
    if constexpr (!Config::DROPS) take_cap(dst, pt, item, warp, q_slice, s);
    // dK += dS^T @ Q                                     [16, SLICE]
    Product::template ab<HEAD_DIM>(dk, dst, q_slice);
  }

  // Writes dK and dV, or the partial sums of this split of the group.
  __device__ __forceinline__ void store(const Sum& dk, const Sum& dv) const {
    const Warp warp;
    const DkdvBlock block(p, BLOCK_N);
    const Sequence sequence(p, block.batch);
    const int row0 = block.key0 + warp.row0();
    const int limit = sequence.seqlen_k - row0;
    const int column0 = warp.column0();
    if (p.group_split > 1) {
      const int64_t units = static_cast<int64_t>(p.batch) * p.num_heads_kv;
      const int64_t row = (block.split * units + p.unit_begin + block.unit) * p.seqlen_k + row0;
      store_floats(dk, 1.0f, p.dk_partial + row * HEAD_DIM + column0, HEAD_DIM, limit, SLICE);
      store_floats(dv, 1.0f, p.dv_partial + row * HEAD_DIM + column0, HEAD_DIM, limit, SLICE);
    } else {
      const int64_t row = sequence.k0 + row0;
      store_floats(
          dk, p.softmax_scale,
          head_begin<float>(p.dk, block.batch, block.head_kv, 0) + row * p.dk.row + column0,
          p.dk.row, limit, p.head_dim - column0);
      store_floats(
          dv, 1.0f,
          head_begin<float>(p.dv, block.batch, block.head_kv, 0) + row * p.dv.row + column0,
          p.dv.row, limit, p.head_dim_v - column0);
    }
  }

  // Address of the normalizers in stage s.
  __device__ __forceinline__ uint32_t normalizers_of(int s) const {
    return tiles.q(s) + static_cast<int>(offsetof(typename Config::Stage, normalizers));
  }

 private:
  __device__ __forceinline__ uint32_t sExchange() const { return shared_address(smem.exchange); }

  __device__ __forceinline__ F32DkdvItem& item(int i) const {
    return smem.items[i % Config::ITEMS];
  }

  // Returns element n * 8 + lane % 4 * 2 of `array`, and the next one.
  __device__ __forceinline__ static float2 statistic(uint32_t array, const Warp& warp, int n) {
    return load_shared_8(array + (n * 8 + (warp.lane % 4) * 2) * 4);
  }

  __device__ __forceinline__ DropoutPlace dropout_place(const F32DkdvItem& item,
                                                        const Warp& warp) const {
    return {sequence_head(p, work.batch, work.head + item.head_in_group), item.row0,
            work.key0 + warp.row0()};
  }

  // dV += P^T @ dO. With dropout, only the kept weights of P^T count.
  __device__ __forceinline__ void multiply_weights(Sum& dv, const Scores& pt,
                                                   const F32DkdvItem& item, const Warp& warp,
                                                   uint32_t dout_slice) const {
    if constexpr (Config::DROPS) {
      Scores kept = pt;
      drop<true>(kept, dropout_of(p), dropout_place(item, warp));
      Product::template ab<HEAD_DIM>(dv, kept, dout_slice);
    } else {
      Product::template ab<HEAD_DIM>(dv, pt, dout_slice);
    }
  }

  __device__ __forceinline__ ScorePlace place(const F32DkdvItem& item, const Warp& warp) const {
    return {alibi_slope(p.scores, work.batch, work.head + item.head_in_group),
            item.row0 + work.seqlen_k - work.seqlen_q, work.key0 + warp.row0()};
  }

  // Computes this warp's slice of S^T = K @ Q.T.
  __device__ __forceinline__ void multiply_qk(Scores& st, const Warp& warp,
                                              uint32_t q_slice) const {
    st.clear();
    Product::template scores<HEAD_DIM, SLICE, Config::UNROLL, Queries::B>(
        st, Rows::at(tiles.k, warp.row0(), warp.column0()), q_slice);
  }

  // Applies soft cap, ALiBi, bias and mask to S^T, and replaces it with P^T.
  __device__ __forceinline__ void exponentiate(Scores& pt, const F32DkdvItem& item,
                                               const Warp& warp, int s, int code) const {
    if (p.scores.has_score_mod) {
      apply_score_mod<Config::DROPS ? Tanh::NONE : Tanh::EXACT, true>(pt, p.scores,
                                                                      place(item, warp));
      add_bias<typename Config::T, true>(
          pt, p.bias,
          {work.batch, work.head + item.head_in_group, item.row0, work.key0 + warp.row0()},
          p.seqlen_q, p.seqlen_k);
    }
    if (code != TILE_FULL) {
      apply_mask_transposed(pt, work.mask(p, item.head_in_group), item.row0,
                            work.key0 + warp.row0(), code);
    }
    const float scale_log2 = p.scores.scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 lse = statistic(tiles.lse(s), warp, n);
      const float2 factor = statistic(normalizers_of(s), warp, n);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = pt.x[0][n][i];
        x = exp2_approx(fmaf(x, scale_log2, -(i % 2 == 0 ? lse.x : lse.y))) *
            (i % 2 == 0 ? factor.x : factor.y);
      }
    }
  }

  // Multiplies dS^T by the derivative of the soft cap, if there is one.
  __device__ __forceinline__ void take_cap(Scores& dst, Scores& pt, const F32DkdvItem& item,
                                           const Warp& warp, uint32_t q_slice, int s) const {
    if (p.scores.softcap != 0.0f && p.scores.softcap < PRECISE_CAP) {
      // Recomputes S^T in place of P^T: for a small cap, tanh cannot be computed accurately enough
      // from lse and P^T.
      multiply_qk(pt, warp, q_slice);
      slices_done(warp);
      sum_slices(pt, warp, sExchange());
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float t = tanhf(pt.x[0][n][i] * p.scores.scale_inside);
          float& x = dst.x[0][n][i];
          if (x != 0.0f) x *= fmaf(-t, t, 1.0f);  // S of a masked key may be NaN or infinite
        }
    } else if (p.scores.softcap != 0.0f) {
      apply_score_mod_derivative(dst, pt, p.scores, place(item, warp),
                                 [&](int n) { return statistic(tiles.lse(s), warp, n); });
    }
  }
};

template <class Config>
__device__ __forceinline__ void f32_dkdv_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using Kernel = F32Dkdv<Config>;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const Kernel kernel(p, smem);
  {
    const DkdvBlock block(p, Config::BLOCK_N);
    const Sequence sequence(p, block.batch);
    if (block.key0 >= sequence.seqlen_k) return;
    kernel.start(block, sequence);
  }
  QueryCopies<Config> queries;
  NormalizerCopy<Target, Config::BLOCK_M> normalizers;
  typename Kernel::Sum dk, dv;
  dk.clear();
  dv.clear();
  run_pipeline<Target, Config::STAGES>(
      decltype(smem.cursor)::count(p, smem.work),
      [&](int i, int s) { kernel.fetch(queries, normalizers, i, s); },
      [&](int s) {
        queries.land(kernel.tiles, s);
        normalizers.land(kernel.normalizers_of(s));
      },
      [&](int i, int s) { kernel.add(dk, dv, i, s); });
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  if constexpr (Config::DROPS) dv.scale(dropout_of(p).scale);
  kernel.store(dk, dv);
}

}  // namespace flash_dist

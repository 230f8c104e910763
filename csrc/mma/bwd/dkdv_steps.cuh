// Steps of a warp of the dK/dV kernel for a stage of queries.
#pragma once

#include "core/bias.cuh"
#include "core/bwd_load.cuh"
#include "core/dkdv_items.cuh"
#include "core/dropout.cuh"
#include "core/ds_scale.h"
#include "core/mask.cuh"
#include "core/scores.cuh"
#include "core/tile.cuh"
#include "mma/bwd/config.h"
#include "mma/fragments.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

// The warp's keys: ROWS keys, from key row0 of the block on, shared by a team of SPLIT warps.
template <class Config>
struct DkdvWarp {
  int lane, number;
  int part;  // index in the team
  int row0;  // first key in the block
  int half;  // index (0 or 1) of the block's key tile that contains the warp's keys

  __device__ __forceinline__ DkdvWarp()
      : lane(threadIdx.x % 32),
        number(threadIdx.x / 32),
        part(number % Config::SPLIT),
        row0(number / Config::SPLIT * Config::ROWS),
        half(row0 / DS_TILE) {}

  __device__ __forceinline__ int team() const { return number / Config::SPLIT; }
};

// The warp's dK and dV of its keys; with SPLIT > 1, only its part of the columns.
template <class Config>
using DkSum = Accumulator<Config::ROW_TILES, Config::HEAD_DIM / 8 / Config::SPLIT>;
template <class Config>
using DvSum = Accumulator<Config::ROW_TILES, Config::HEAD_DIM_V / 8 / Config::SPLIT>;

// YES, NO: for calls with or without soft cap, ALiBi or bias (ScoreParams::has_score_mod). MAYBE:
// decided at run time. A step compiled for YES needs more registers, so it unrolls its products
// less.
enum class ScoreMod { NO, YES, MAYBE };

// Computes P^T and dS^T for a stage of queries and the warp's keys.
template <class Config>
struct DkdvStep {
  using Target = typename Config::Target;
  using T = typename Config::T;
  static constexpr int MT = Config::ROW_TILES;
  static constexpr int NT = Config::QUERIES / 8;
  static constexpr bool DROPS = Config::DROPS;
  using Scores = Accumulator<MT, NT>;

  const BwdParams& p;
  typename Config::Smem& smem;
  const DkdvTiles<Config>& tiles;
  DkdvWarp<Config> warp;
  int s;                            // index of the stage
  int code;                         // the mask's code of the tile
  int slot;                         // dS slot; -1: not stored
  int row0;                         // first query
  Operand<Config::HEAD_DIM> a_k;    // the warp's rows of K
  Operand<Config::HEAD_DIM_V> a_v;  // the warp's rows of V

  __device__ __forceinline__ DkdvStep(const BwdParams& params, typename Config::Smem& shared,
                                      const DkdvTiles<Config>& where, const DkdvWarp<Config>& whose,
                                      int stage, int known)
      : p(params),
        smem(shared),
        tiles(where),
        warp(whose),
        s(stage),
        code(known),
        slot(shared.stage[stage].item.slot[whose.half]),
        row0(shared.stage[stage].item.row0),
        a_k(Operand<Config::HEAD_DIM>::a(tiles.k + warp.row0 * Config::HEAD_DIM * 2)),
        a_v(Operand<Config::HEAD_DIM_V>::a(tiles.v + warp.row0 * Config::HEAD_DIM_V * 2)) {}

  // S^T = K @ Q.T                                        [ROWS, QUERIES] per warp
  // P^T = exp2(S^T * scale - lse); with dropout, dropped weights are negative
  template <ScoreMod SCORE_MOD>
  __device__ __forceinline__ void probabilities(Scores& pt, int sub, float scale_log2) const {
    constexpr int UNROLL = SCORE_MOD == ScoreMod::YES ? 2 : Config::UNROLL_S;
    pt.clear();
    if (SCORE_MOD != ScoreMod::NO && p.bias.data != nullptr) begin_with_bias(pt, sub);
    gemm_abt<Target, T, Config::HEAD_DIM, UNROLL, MT, NT>(
        pt, a_k, by_query<Config::HEAD_DIM>(tiles.q(s)), sub);
    const bool has_score_mod =
        SCORE_MOD == ScoreMod::YES || (SCORE_MOD == ScoreMod::MAYBE && p.scores.has_score_mod);
    // NOTE: a single branch for score modification and mask: two branches spill registers at
    // head_dim 64.
    if (code != TILE_FULL || has_score_mod) {
      if (has_score_mod)
        apply_score_mod<DROPS ? Tanh::NONE : Tanh::FAST, true>(pt, p.scores, place(sub));
      const int head_in_group = smem.stage[s].item.head_in_group;
      apply_mask_transposed(pt, DkdvCursor<Config>::mask_of(p, smem.work, head_in_group),
                            row0 + sub, smem.work.key0 + warp.row0, code);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 lse = load_shared_8(tiles.lse(s) + (sub + n * 8 + (warp.lane % 4) * 2) * 4);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          pt.x[m][n][2 * h] = exp2_approx(fmaf(pt.x[m][n][2 * h], scale_log2, -lse.x));
          pt.x[m][n][2 * h + 1] = exp2_approx(fmaf(pt.x[m][n][2 * h + 1], scale_log2, -lse.y));
        }
    }
    if constexpr (DROPS) mark_dropped(pt, dropout_of(p), dropout_place(sub));
  }

  // dP^T = V @ dO.T                                      [ROWS, QUERIES] per warp
  // dS^T = P^T * (dP^T - delta)
  template <ScoreMod SCORE_MOD>
  __device__ __forceinline__ void score_gradients(Scores& dst, const Scores& pt, int sub) const {
    constexpr int UNROLL = SCORE_MOD == ScoreMod::YES ? 2 : Config::UNROLL_DP;
    dst.clear();
    gemm_abt<Target, T, Config::HEAD_DIM_V, UNROLL, MT, NT>(
        dst, a_v, by_query<Config::HEAD_DIM_V>(tiles.dout(s)), sub);
    if constexpr (DROPS) drop_marked(dst, pt, dropout_of(p).scale);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 delta = load_shared_8(tiles.delta(s) + (sub + n * 8 + (warp.lane % 4) * 2) * 4);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float left = weight(pt.x[m][n][2 * h]), right = weight(pt.x[m][n][2 * h + 1]);
          dst.x[m][n][2 * h] = left * minus_delta<T>(dst.x[m][n][2 * h], delta.x);
          dst.x[m][n][2 * h + 1] = right * minus_delta<T>(dst.x[m][n][2 * h + 1], delta.y);
        }
    }
  }

  // Multiplies x by the derivative of the soft cap. x is dS^T, or P^T after its use for dV.
  __device__ __forceinline__ void take_cap(Scores& x, const Scores& pt, int sub) const {
    if (DROPS || p.scores.softcap == 0.0f) return;
    apply_score_mod_derivative(x, pt, p.scores, place(sub), [&](int n) {
      return load_shared_8(tiles.lse(s) + (sub + n * 8 + (warp.lane % 4) * 2) * 4);
    });
  }

  // Address of this lane's part of dS in the workspace, for A fragment (0, 0) of the warp's keys
  // and the stage's queries. Fragment (m, k) is m * 4 + k blocks further, as a tile has 4 x 4
  // blocks.
  __device__ __forceinline__ uint8_t* gDs() const {
    return static_cast<uint8_t*>(p.ds) + static_cast<int64_t>(slot) * DS_TILE_BYTES +
           ((smem.work.key0 + warp.row0) % DS_TILE / 16 * 4 + row0 % DS_TILE / 16) *
               DS_BLOCK_BYTES +
           warp.lane * 16;
  }

 private:
  // Returns a weight without the sign that marks it as dropped.
  __device__ __forceinline__ static float weight(float x) { return DROPS ? fabsf(x) : x; }

  __device__ __forceinline__ DropoutPlace dropout_place(int sub) const {
    const DkdvWork& work = smem.work;
    const int head = work.head + smem.stage[s].item.head_in_group;
    return {sequence_head(p, work.batch, head), row0 + sub, work.key0 + warp.row0};
  }

  __device__ __forceinline__ void begin_with_bias(Scores& pt, int sub) const {
    const DkdvWork& work = smem.work;
    const int head = work.head + smem.stage[s].item.head_in_group;
    add_bias<T, true, BeginWithBias>(
        pt, p.bias, {work.batch, head, row0 + sub, work.key0 + warp.row0}, p.seqlen_q, p.seqlen_k);
  }

  __device__ __forceinline__ ScorePlace place(int sub) const {
    const DkdvWork& work = smem.work;
    const int head = work.head + smem.stage[s].item.head_in_group;
    return {alibi_slope(p.scores, work.batch, head), row0 + sub + work.seqlen_k - work.seqlen_q,
            work.key0 + warp.row0};
  }

  // The rows of Q or dO as operand B.
  template <int COLUMNS>
  __device__ __forceinline__ static Operand<COLUMNS> by_query(uint32_t tile) {
    return NT == 1 ? Operand<COLUMNS>::b_8(tile) : Operand<COLUMNS>::b(tile);
  }
};

// Adds the contribution of a stage of queries to dK and dV.
template <class Config>
struct DkdvCompute {
  using Step = DkdvStep<Config>;
  using OperandK = Operand<Config::HEAD_DIM>;
  using OperandV = Operand<Config::HEAD_DIM_V>;
  const BwdParams& p;
  typename Config::Smem& smem;
  const DkdvTiles<Config>& tiles;
  const DkdvWarp<Config>& warp;
  DkSum<Config>& dk;
  DvSum<Config>& dv;
  const float& scale_log2;

  __device__ __forceinline__ void operator()(int, int s) const {
    if constexpr (Config::SPLIT == 1) {
      without_exchange(s);
    } else {
      in_team(s);
    }
  }

  // SPLIT = 1: P^T and dS^T stay in registers, as A operands.
  __device__ __forceinline__ void without_exchange(int s) const {
    using Target = typename Config::Target;
    using T = typename Config::T;
    constexpr int MT = Config::ROW_TILES;
    const int code = tile_code(p, smem.work, smem.stage[s].item, warp.half);
    if (code == TILE_EMPTY) return;
    const Step step(p, smem, tiles, warp, s, code);
#pragma unroll 1
    for (int sub = 0; sub < Config::BLOCK_M; sub += Config::SUB_M) {
      typename Step::Scores pt, dst;
      step.template probabilities<ScoreMod::MAYBE>(pt, sub, scale_log2);
      // dV += P^T @ dO [ROWS, HEAD_DIM_V]
#pragma unroll
      for (int k = 0; k < Config::SUB_M / 16; ++k) {
        uint32_t rP[MT][4];
        to_a_operand<Target, T>(rP, pt, k);
        if constexpr (Config::DROPS) drop_marked(rP);
        gemm_ab_step<Target, T, Config::HEAD_DIM_V>(dv, rP, OperandV::b_trans(tiles.dout(s)),
                                                    sub + k * 16);
      }
      step.take_cap(pt, pt, sub);
      step.template score_gradients<ScoreMod::MAYBE>(dst, pt, sub);
      // Stores dS^T if it has a slot. dK += dS^T @ Q     [ROWS, HEAD_DIM]
      uint8_t* gDs = step.gDs();
#pragma unroll
      for (int k = 0; k < Config::SUB_M / 16; ++k) {
        uint32_t rDs[MT][4];
        to_a_operand<Target, T>(rDs, dst, k);
        if (step.slot >= 0) {
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            store_global_16(gDs + (m * 4 + sub / 16 + k) * DS_BLOCK_BYTES,
                            {rDs[m][0], rDs[m][1], rDs[m][2], rDs[m][3]});
          }
        }
        gemm_ab_step<Target, T, Config::HEAD_DIM>(dk, rDs, OperandK::b_trans(tiles.q(s)),
                                                  sub + k * 16);
      }
    }
  }

  // SPLIT > 1: the warp stores P^T and dS^T of its queries in shared memory. Then each warp of the
  // team reads those of all queries, for its own columns.
  __device__ __forceinline__ void in_team(int s) const {
    using Target = typename Config::Target;
    using T = typename Config::T;
    constexpr int SPLIT = Config::SPLIT;
    constexpr int MT = Config::ROW_TILES;
    constexpr int BLOCKS = Config::BLOCK_M / 16;
    const int code = tile_code(p, smem.work, smem.stage[s].item, warp.half);
    if (code == TILE_EMPTY) {  // all warps of the team take the same branch
      // Not needed for the results: the stage's barrier already separates the stages. But
      // compute-sanitizer's racecheck reports hazards between stages if only some teams arrive at
      // their barrier.
      if constexpr (Config::BLOCK_N > MASK_TILE) meet<Config>(warp.team());
      return;
    }
    const Step step(p, smem, tiles, warp, s, code);
    // NOTE: the loop runs once, because SUB_M is the whole stage. Without the loop, the compiler
    // would move the address computations below into the products.
#pragma unroll 1
    for (int sub = warp.part * Config::QUERIES; sub < Config::BLOCK_M; sub += Config::SUB_M) {
      typename Step::Scores pt, dst;
      if constexpr (Config::DROPS) {
        step.template probabilities<ScoreMod::MAYBE>(pt, sub, scale_log2);
        step.template score_gradients<ScoreMod::MAYBE>(dst, pt, sub);
        drop_marked(pt, pt, 1.0f);
      } else if (p.scores.has_score_mod) {
        step.template probabilities<ScoreMod::YES>(pt, sub, scale_log2);
        step.template score_gradients<ScoreMod::YES>(dst, pt, sub);
        step.take_cap(dst, pt, sub);
      } else {
        step.template probabilities<ScoreMod::NO>(pt, sub, scale_log2);
        step.template score_gradients<ScoreMod::NO>(dst, pt, sub);
      }
      uint8_t* gDs = step.gDs();
      const int team = warp.team();
      const int offset = team * MT * BLOCKS * FRAGMENT_BYTES + warp.lane * 16;
      const uint32_t sP = shared_address(smem.p) + offset;
      const uint32_t sDs = shared_address(smem.ds) + offset;
      put_fragments<Target, T, BLOCKS>(sP, pt, warp.part);
      put_fragments<Target, T, BLOCKS>(sDs, dst, warp.part);
      meet<Config>(team);  // all parts are stored; they are read before the stage's barrier
      // dV += P^T @ dO                                   [ROWS, HEAD_DIM_V / SPLIT]
      const auto b_dv = share(OperandV::b_trans(tiles.dout(s)), warp.part);
      const auto b_dk = share(OperandK::b_trans(tiles.q(s)), warp.part);
#pragma unroll
      for (int k = 0; k < BLOCKS; ++k) {
        uint32_t rP[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) get_fragment(rP[m], sP + (m * BLOCKS + k) * FRAGMENT_BYTES);
        gemm_ab_step<Target, T, Config::HEAD_DIM_V, SPLIT>(dv, rP, b_dv, k * 16);
      }
      // Stores dS^T if it has a slot. dK += dS^T @ Q     [ROWS, HEAD_DIM / SPLIT]
#pragma unroll
      for (int k = 0; k < BLOCKS; ++k) {
        uint32_t rDs[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          get_fragment(rDs[m], sDs + (m * BLOCKS + k) * FRAGMENT_BYTES);
          if (step.slot >= 0 && k % SPLIT == warp.part) {
            store_global_16(gDs + (m * 4 + k) * DS_BLOCK_BYTES,
                            {rDs[m][0], rDs[m][1], rDs[m][2], rDs[m][3]});
          }
        }
        gemm_ab_step<Target, T, Config::HEAD_DIM, SPLIT>(dk, rDs, b_dk, k * 16);
      }
    }
  }
};

}  // namespace flash_dist

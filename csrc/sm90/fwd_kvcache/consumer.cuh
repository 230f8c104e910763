// A consumer warpgroup of the Hopper forward that is bit-identical to decoding: it computes 64
// queries of one tile after the other.
//
//   issue S = Q @ K(first).T
//   for each key block j, from the first to the last:
//     wait for S; mask; P = exp2(S - top), sums
//     issue P @ V(j), in pieces of 64 columns; combine each with O of the group of 8 key blocks,
//     while the next piece, or S = Q @ K(j + 1).T, is in flight
//     at the end of a group, combine it with O of the tile
//
// The arithmetic is the same as in sm90/decode/kernel.cuh, operation by operation.
#pragma once

#include <type_traits>

#include "core/combine.cuh"
#include "core/decode_rows.cuh"
#include "core/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fwd/output.cuh"
#include "sm90/fwd_kvcache/config.h"
#include "sm90/rows.cuh"

namespace flash_dist {

// Computes one warpgroup's 64 queries of a tile.
template <class Config>
struct FwdKvcacheTile {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  static constexpr int KEY_STEPS = KEY_BLOCK / 16;  // steps of P @ V
  static constexpr int KEY_TILES = KEY_BLOCK / 8;   // 8-column tiles of S
  static constexpr int PIECE_TILES = Config::PIECE / 8;
  static constexpr int PIECES = Config::PIECES;
  static constexpr int OT = Config::OT;
  // True if S of the next key block is issued while pieces of this key block are in flight. A
  // larger O leaves no registers for that S.
  static constexpr bool ISSUES_AHEAD = PIECES <= 2;
  static constexpr int IN_FLIGHT = PIECES == 2 ? 2 : 1;  // pieces in flight
  using Scores = Accumulator<1, KEY_TILES>;
  using Weights = uint32_t[KEY_STEPS][1][4];  // A operands of P @ V
  using Piece = Accumulator<1, PIECE_TILES>;
  using Sums = float[2][Config::PARTS];  // partial sums of P over the lane's columns

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const typename Config::Work& work;
  typename Config::Keys keys;  // the stage of the current key block
  const float scale_log2;
  const uint64_t a_q;
  Partial<OT> group;

  __device__ __forceinline__ FwdKvcacheTile(const typename Config::Params& params_,
                                            typename Config::Smem& smem_,
                                            const typename Config::Work& work_)
      : params(params_),
        smem(smem_),
        work(work_),
        keys{work.tiles},
        scale_log2(params.p.softmax_scale * LOG2_E),
        a_q(QTile::by_rows(
            uniform(shared_address(smem.q[0]) + consumer() * 64 * QTile::ROW_BYTES))) {}

  // Computes O, top and sum over all keys, in `group`.
  __device__ __forceinline__ void compute() {
    const StepBounds& bounds = work.bounds;
    group.clear();
    smem.q_barriers.wait_for_data(typename Config::Queries{work.queries});
    int j = bounds.begin;
    if constexpr (ISSUES_AHEAD) {
      Scores s;
      issue_scores(s);
#pragma unroll 1
      for (; j + 1 < bounds.end; ++j) {
        add_key_block(s, j, std::false_type{});
        if (j % GROUP_BLOCKS == GROUP_BLOCKS - 1) end_group(j, false);
      }
      add_key_block(s, j, std::true_type{});
      end_group(j, true);
    } else {
#pragma unroll 1
      for (; j < bounds.end; ++j) {
        Scores s;
        issue_scores(s);
        add_key_block(s, j, std::true_type{});
        const bool is_last = j + 1 == bounds.end;
        if (is_last || j % GROUP_BLOCKS == GROUP_BLOCKS - 1) end_group(j, is_last);
      }
    }
    if constexpr (Config::OUT_STAGE != OutStage::QUERIES) smem.q_barriers.release(0);
  }

  // Normalizes O and stores lse.
  __device__ __forceinline__ void finish() {
    const FwdParams& p = params.p;
    const int row0 = work.block.row0 + warp_row();
    float* lse = p.lse + lse_begin(p, work.block.batch, work.block.head, work.sequence.q0) + row0;
    const int lane = fresh_thread() % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row_lse = finish_lse(group.top[h], group.sum[h]);
      float inverse = finish_inverse(group.sum[h]);
      if (p.sinks != nullptr) join_sink(p.sinks[work.block.head], row_lse, inverse);
      const int row = lane / 4 + 8 * h;
      if (lane % 4 == 0 && row0 + row < work.sequence.seqlen_q) lse[row] = row_lse;
#pragma unroll
      for (int n = 0; n < OT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = group.out.x[0][n][2 * h + e];
          x = finish_out(x, inverse);
        }
    }
  }

 private:
  // Returns the index of this warp's first query in the tile.
  __device__ __forceinline__ static int warp_row() {
    return consumer() * 64 + warp_of_consumer() * 16;
  }

  // S = Q @ K.T                                             [64, KEY_BLOCK]
  __device__ __forceinline__ void issue_scores(Scores& s) const {
    smem.k_barriers.wait_for_data(keys);
    const uint64_t b_k = KTile::by_rows(shared_address(smem.k[keys.stage()]));
    wgmma_fence();
    wgmma<T, false, false, true>(s.x[0], a_q, b_k);
#pragma unroll
    for (int k = 1; k < Config::HEAD_DIM / 16; ++k) {
      wgmma<T, false, false>(s.x[0], a_q + QTile::rows_step(k), b_k + KTile::rows_step(k));
    }
    wgmma_commit();
  }

  // O = P @ V                                               [64, PIECE]
  __device__ __forceinline__ void issue_piece(Piece& out, Weights& weights, int stage,
                                              int i) const {
    const uint64_t b_v = KTile::by_columns(shared_address(smem.v[stage])) + i * (KTile::BYTES >> 4);
    wgmma_fence();
    wgmma<T, true, true>(out.x[0], weights[0][0], b_v);
#pragma unroll
    for (int k = 1; k < KEY_STEPS; ++k) {
      wgmma<T, true>(out.x[0], weights[k][0], b_v + KTile::columns_step(k));
    }
    wgmma_commit();
  }

  // Adds key block j, whose scores have been issued, to the group.
  template <class IsLast>
  __device__ __forceinline__ void add_key_block(Scores& s, int j, IsLast) {
    constexpr int LAST = PIECES - 1;
    Combine combines[2] = {Combine(0.0f, 0.0f), Combine(0.0f, 0.0f)};
    Weights weights;
    Sums sums;
    Piece out[IN_FLIGHT];
    wgmma_wait<0>();
    hold(s.x[0]);
    smem.k_barriers.release(keys.stage());
    to_weights(s, j, combines, weights, sums);
    const int stage = keys.stage();
    smem.v_barriers.wait_for_data(keys);
    if (!is_clean(j)) clear_values(j, stage);
    keys.advance();
    hold(weights);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) issue_piece(out[i], weights, stage, i);
    add_sums(sums, combines);
    scale_group(combines);
#pragma unroll
    for (int i = 0; i < LAST; ++i) {
      wgmma_wait<IN_FLIGHT - 1>();
      hold(out[i % IN_FLIGHT].x[0]);
      add_piece(out[i % IN_FLIGHT], combines, i);
      if (i + IN_FLIGHT <= LAST) issue_piece(out[i % IN_FLIGHT], weights, stage, i + IN_FLIGHT);
    }
    constexpr bool IS_BEHIND = ISSUES_AHEAD && !IsLast::value;  // the next S is issued below
    if constexpr (IS_BEHIND && PIECES == 2) issue_scores(s);
    wgmma_wait<IS_BEHIND && PIECES == 2 ? 1 : 0>();
    hold(out[LAST % IN_FLIGHT].x[0]);
    hold(weights);
    smem.v_barriers.release(stage);
    if constexpr (IS_BEHIND && PIECES == 1) issue_scores(s);
    add_piece(out[LAST % IN_FLIGHT], combines, LAST);
  }

  // Sets masked scores to -inf. Converts S to P = exp2(S * scale - top), sums P and rounds it.
  // Combines top with that of the group. combines: receives the factors for the group's sum and O.
  __device__ __forceinline__ void to_weights(Scores& s, int j, Combine (&combines)[2],
                                             Weights& weights, Sums& sums) {
    const StepBounds& bounds = work.bounds;
    if (j < bounds.full_begin || j >= bounds.full_end) {
      const Mask mask(params.p.mask, work.place);
      const int row = work.block.row0 + warp_row() + fresh_thread() % 32 / 4;
      const int2 ranges[2] = {{mask.band_begin(row), mask.band_end(row)},
                              {mask.band_begin(row + 8), mask.band_end(row + 8)}};
      mask_ranges(s, ranges, j * KEY_BLOCK);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        top = fmaxf(fmaxf(top, s.x[0][n][2 * h]), s.x[0][n][2 * h + 1]);
      }
      top = __fmul_rn(quad_max(top), scale_log2);
      sum_weights(s, h, top == -INFINITY ? 0.0f : top, sums[h]);
      combines[h] = Combine(group.top[h], top);
      group.top[h] = combines[h].top;
    }
#pragma unroll
    for (int k = 0; k < KEY_STEPS; ++k) to_a_operand<Target, T>(weights[k], s, k);
  }
  // Converts S to P for one row of a lane, and finds the partial sums of P over the lane's columns
  // of the key block.
  __device__ __forceinline__ void sum_weights(Scores& s, int h, float offset,
                                              float (&sums)[Config::PARTS]) const {
    constexpr int PART_TILES = Config::SUMMED_KEYS / Config::PARTS / 8;
#pragma unroll
    for (int i = 0; i < Config::PARTS; ++i) sums[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      float& left = s.x[0][n][2 * h];
      float& right = s.x[0][n][2 * h + 1];
      left = exp2_approx(fmaf(left, scale_log2, -offset));
      right = exp2_approx(fmaf(right, scale_log2, -offset));
      sums[n / PART_TILES % Config::PARTS] += left + right;
    }
  }
  // Adds the partial sums of all lanes of a row, and combines the sum with the group's.
  __device__ __forceinline__ void add_sums(const Sums& sums, const Combine (&combines)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Config::PARTS; ++i) sum += quad_sum(sums[h][i]);
      group.sum[h] = combines[h](group.sum[h], sum);
    }
  }

  // Combines a key block with the group in two steps: scale_group() while the products are in
  // flight, then add_piece() for the columns of each product.
  __device__ __forceinline__ void scale_group(const Combine (&combines)[2]) {
#pragma unroll
    for (int n = 0; n < OT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = group.out.x[0][n][e];
        x = __fmul_rn(x, combines[e / 2].keep);
      }
  }
  __device__ __forceinline__ void add_piece(const Piece& key_block, const Combine (&combines)[2],
                                            int piece) {
#pragma unroll
    for (int n = 0; n < PIECE_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = group.out.x[0][piece * PIECE_TILES + n][e];
        x = __fmaf_rn(key_block.x[0][n][e], combines[e / 2].add, x);
      }
  }

  // Returns the address of this thread's slot for O of the tile while a group of keys is computed.
  __device__ __forceinline__ float4* parked() const {
    const int thread = fresh_thread() - WARPGROUP;
    if constexpr (Config::PARKS_IN_MEMORY) {
      return params.parked + int64_t{fresh_block()} * OT * Config::CONSUMER_THREADS + thread;
    } else {
      return &smem.parked[0][thread];
    }
  }
  // Combines the group, which ends with key block j, with O of the previous groups, if any. Stores
  // the result for the next group, unless is_last: the group is the last one of the tile.
  __device__ __forceinline__ void end_group(int j, bool is_last) {
    float4* const own = parked();
    float2* const stats =
        &smem.parked_stats[warp_row() + fresh_thread() % 32 / 4];  // stats[8 * h] belongs to row h
    if (j / GROUP_BLOCKS != work.bounds.begin / GROUP_BLOCKS) {
      Combine combines[2] = {Combine(0.0f, 0.0f), Combine(0.0f, 0.0f)};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        combines[h] = Combine(stats[8 * h].x, group.top[h]);
        group.top[h] = combines[h].top;
        group.sum[h] = combines[h](stats[8 * h].y, group.sum[h]);
      }
#pragma unroll
      for (int n = 0; n < OT; ++n) {
        const float4 before = own[n * Config::CONSUMER_THREADS];
        float (&x)[4] = group.out.x[0][n];
        x[0] = combines[0](before.x, x[0]);
        x[1] = combines[0](before.y, x[1]);
        x[2] = combines[1](before.z, x[2]);
        x[3] = combines[1](before.w, x[3]);
      }
    }
    if (is_last) return;
    __syncwarp();  // all lanes of the row have read top and sum
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float (&x)[4] = group.out.x[0][n];
      own[n * Config::CONSUMER_THREADS] = {x[0], x[1], x[2], x[3]};
    }
    if (fresh_thread() % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) stats[8 * h] = {group.top[h], group.sum[h]};
    }
    __syncwarp();  // the four lanes of a row read what one of them has written
    group.clear();
  }

  // True if all keys of key block j exist or read as zeros. NOTE: boxes of pages without existing
  // keys are not loaded, so they do not read as zeros.
  __device__ __forceinline__ bool is_clean(int j) const {
    const RowSpan& exist = work.keys;
    const bool to_end = params.ends_in_zeros && exist.end == work.sequence.seqlen_k;
    return exist.first <= j * KEY_BLOCK && (to_end || (j + 1) * KEY_BLOCK <= exist.end);
  }
  // Zeroes the values of keys that do not exist. All consumers must call this for the same key
  // block.
  __device__ __forceinline__ void clear_values(int j, int stage) const {
    const RowSpan keep{work.keys.first - j * KEY_BLOCK, work.keys.end - j * KEY_BLOCK};
    clear_rows<KTile, KEY_BLOCK, Config::V_PANELS, Config::CONSUMER_THREADS>(
        shared_address(smem.v[stage]), keep, fresh_thread() - WARPGROUP);
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, Config::CONSUMER_THREADS);
  }
};

template <class Config>
struct FwdKvcacheConsumer {
  const typename Config::Params& params;
  typename Config::Smem& smem;

  __device__ __forceinline__ void run() const { consume_works<Config>(*this); }

  __device__ __forceinline__ void compute(const typename Config::Work& work) const {
    FwdKvcacheTile<Config> tile(params, smem, work);
    tile.compute();
    tile.finish();
    FwdSm90Output<Config>{params, smem, work}.store(tile.group.out);
  }
};

}  // namespace flash_dist

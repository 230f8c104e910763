// Forward attention on mma.sync: out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      x = query tile, batch and query head (of a head the longest causal tiles first).
// Block     WARPS warps, each owning ROWS query rows over the whole head_dim.
// Shared    Q tile (later the output tile), one K tile, one V tile.
// Pipeline  V(j) arrives while S = Q @ K(j).T is computed, K(j - 1) while the softmax and P @ V(j)
//           run. Key tiles are walked from the last to the first, so that causal tiles that need a
//           mask come first and the long loop has none.
#pragma once

#include "core/blocks.cuh"
#include "core/hide.cuh"
#include "core/softmax.cuh"
#include "core/uncovered.cuh"
#include "mma/fragments.cuh"
#include "mma/fwd/config.h"

namespace flash_dist {

template <bool FIRST, class T>
__device__ __forceinline__ const T& pick(const T& first, const T& second) {
  if constexpr (FIRST) {
    return first;
  } else {
    return second;
  }
}

template <class Config>
__device__ __forceinline__ void fwd_block(const FwdParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int MT = Config::ROW_TILES;
  constexpr int NT = BLOCK_N / 8;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sQ = shared_address(smem.q);
  const uint32_t sK = shared_address(smem.k);
  const uint32_t sV = shared_address(smem.v);

  const int warp_row0 = (threadIdx.x / 32) * Config::ROWS;
  const int lane = threadIdx.x % 32;

  const auto commit = [] {
    if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();
  };
  const FwdBlock block(p, BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (sequence.uncovered_q) fill_uncovered<Config, 2>(p, block);
  if (block.row0 >= sequence.seqlen_q) return;
  {
    TileCopy<Target, BLOCK_M, HEAD_DIM, Config::THREADS> copy_q;
    copy_q.fetch(sQ,
                 head_begin(p.q, block.batch, block.head_kv, block.member) +
                     (sequence.q0 + block.row0) * p.q.row,
                 p.q.row, {0, sequence.seqlen_q - block.row0}, p.head_dim);
    copy_q.land(sQ);
    commit();
  }
  const FwdWork<BLOCK_M, BLOCK_N> mine(p, block, sequence);
  if (threadIdx.x == 0) smem.work = mine;
  // Where the accumulators need the registers it is read from shared memory, step by step.
  const auto& work = pick<Config::SHARES_WORK>(smem.work, mine);

  Accumulator<MT, HEAD_DIM_V / 8> o;
  o.clear();
  SoftmaxState<MT> state;
  state.clear();

  const auto a_q = Operand<HEAD_DIM>::a(sQ + warp_row0 * HEAD_DIM * 2);
  const auto b_k = Operand<HEAD_DIM>::b(sK);
  const auto b_v = Operand<HEAD_DIM_V>::b_trans(sV);
  const float scale_log2 = p.scores.scale * LOG2_E;

  TileCopy<Target, BLOCK_N, HEAD_DIM, Config::THREADS> copy_k;
  TileCopy<Target, BLOCK_N, HEAD_DIM_V, Config::THREADS> copy_v;
  const auto fetch_k = [&](const auto& w, int key0) {
    copy_k.fetch(sK, w.k + key0 * p.k.row, p.k.row, {w.keys.first - key0, w.keys.end - key0},
                 p.head_dim);
  };
  const auto fetch_v = [&](const auto& w, int key0) {
    copy_v.fetch(sV, w.v + key0 * p.v.row, p.v.row, {w.keys.first - key0, w.keys.end - key0},
                 p.head_dim_v);
  };
  const auto arrive = [](auto pending) {
    if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<decltype(pending)::value>();
    __syncthreads();
  };
  constexpr std::integral_constant<int, 0> ALL;
  constexpr std::integral_constant<int, 1> ALL_BUT_NEWEST;

  int j = mine.walk.end - 1;
  if (j >= mine.walk.begin) {
    const int key0 = mine.walk.key0(j);
    fetch_k(mine, key0);
    copy_k.land(sK);
    commit();
    fetch_v(mine, key0);
    commit();
    arrive(ALL_BUT_NEWEST);
  } else {
    arrive(ALL);  // Q's place becomes the stage of the output
  }

  // K(j) is in, V(j) on its way.
  const auto step = [&](auto masked) {
    constexpr bool MASKED = decltype(masked)::value;
    // Tiles that need no test are part of a range.
    const auto key0 = [&](int i) { return MASKED ? work.walk.key0(i) : i * BLOCK_N; };

    // S = Q @ K.T                                        [ROWS, BLOCK_N] per warp
    Accumulator<MT, NT> s;
    s.clear();
    gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, MT, NT>(s, a_q, b_k, 0);

    copy_v.land(sV);
    arrive(ALL);  // V(j) is in; everybody is done with K(j)
    if (j > work.walk.begin) fetch_k(work, key0(j - 1));
    commit();

    if constexpr (MASKED) {
      int code = work.walk.code(j, warp_row0 / MASK_TILE);
      if (p.scores.bends) {
        const int row0 = work.row0 + warp_row0 + work.place.seqlen_k - work.place.seqlen_q;
        bend<Tanh::FAST>(s, p.scores, {work.slope, row0, key0(j)});
        if (work.walk.is_full(j)) code = TILE_FULL;
      }
      if (code != TILE_FULL) {
        hide(s, Mask(p.mask, work.place), work.row0 + warp_row0, key0(j), code);
      }
    }
    online_softmax(s, o, state, scale_log2);

    // O += P @ V                                         [ROWS, HEAD_DIM_V] per warp
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      uint32_t rP[MT][4];
      to_a_operand<Target, T>(rP, s, k);
      gemm_ab_step<Target, T, HEAD_DIM_V>(o, rP, b_v, k * 16);
    }
    if (j > work.walk.begin) {
      copy_k.land(sK);
      arrive(ALL);  // K(j - 1) is in; everybody is done with V(j)
      fetch_v(work, key0(j - 1));
      commit();
    }
  };

  // Tiles to test or to bend, tiles to take as they are, tiles to test.
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    const bool until_full = round == 0 && !p.scores.bends;
    const int tested_until = until_full ? work.walk.full_end : work.walk.begin;
#pragma unroll 1
    for (; j >= tested_until; --j) step(std::true_type{});
#pragma unroll 1
    for (; j >= work.walk.full_begin; --j) step(std::false_type{});
  }

  // O / sum, lse = max * scale + ln(sum)
  const FwdBlock again(p, BLOCK_M);
  const Sequence rows(p, again.batch);
  const int first_row = again.row0 + warp_row0;
  const int rows_left = rows.seqlen_q - first_row;
  float* gLse = p.lse + lse_begin(p, again.batch, again.head, rows.q0) + first_row;
  const float* sink = p.sinks == nullptr ? nullptr : p.sinks + again.head;
  normalize_rows(o, state, gLse, lane, rows_left, p.scores.scale, sink);
  store_rows<Target, T, HEAD_DIM_V, MT>(
      o, sQ + warp_row0 * HEAD_DIM_V * 2,
      head_begin(p.out, again.batch, again.head_kv, again.member) +
          (rows.q0 + first_row) * p.out.row,
      p.out.row, rows_left, p.head_dim_v);
}

}  // namespace flash_dist

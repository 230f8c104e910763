// Forward attention in fp32: out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      x = query tile, batch and query head. The last query tiles of a head come first: with a
//           causal mask they are the longest.
// Block     WARPS warps. SPLIT warps share ROWS query rows; each sums S over a slice of the columns
//           and owns that slice of the output.
// Shared    Q tile, one K tile, one V tile, the slices' partial sums of S.
// Pipeline  V(j) is copied during S = Q @ K(j).T, K(j - 1) during the softmax and P @ V(j). Key
//           blocks run from last to first: the few that a causal mask cuts come first, and the long
//           loop after them applies no mask.
#pragma once

#include "core/blocks.cuh"
#include "core/fwd_steps.cuh"
#include "core/softmax.cuh"
#include "core/uncovered.cuh"
#include "f32/fragments.cuh"
#include "f32/fwd/config.h"
#include "f32/product.cuh"

namespace flash_dist {

// Writes out = O / sum and lse = max * scale + ln(sum).
template <class Config>
__device__ __forceinline__ void store_f32_output(
    const FwdParams& p, const FwdBlock& block, const Sequence& sequence,
    const WarpPlace<Config>& warp, Accumulator<Config::ROW_TILES, Config::SLICE / 8>& o,
    const SoftmaxState<Config::ROW_TILES>& state, float scale_log2) {
  const int first_row = block.row0 + warp.row0();
  const int rows_left = sequence.seqlen_q - first_row;
  float* gLse = p.lse + lse_begin(p, block.batch, block.head, sequence.q0) + first_row;
#pragma unroll
  for (int m = 0; m < Config::ROW_TILES; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(state.row_sum[m][h]);
      const bool empty = sum == 0.0f;  // no visible key
      float inverse = empty ? 0.0f : 1.0f / sum;
      // The offset in P = exp2(S * scale_log2 - offset) was rounded: `rest` is its rounding error.
      const float top = state.row_max[m][h];
      const float rest = fmaf(top, scale_log2, -__fmul_rn(top, scale_log2)) * LN_2;
      float row_lse = empty ? -INFINITY : fmaf(top, p.scores.scale, logf(sum) - rest);
      if (p.sinks != nullptr) join_sink(p.sinks[block.head], row_lse, inverse);
      const int row = m * 16 + h * 8 + warp.lane / 4;
      if (warp.slice == 0 && warp.lane % 4 == 0 && row < rows_left) gLse[row] = row_lse;
#pragma unroll
      for (int n = 0; n < Config::SLICE / 8; ++n) {
        o.x[m][n][2 * h] *= inverse;
        o.x[m][n][2 * h + 1] *= inverse;
      }
    }
  float* gOut = head_begin<float>(p.out, block.batch, block.head_kv, block.head_in_group) +
                static_cast<int64_t>(sequence.q0 + first_row) * p.out.row + warp.column0();
  store_floats(o, 1.0f, gOut, p.out.row, rows_left, p.head_dim_v - warp.column0());
}

template <class Config>
__device__ __forceinline__ void f32_fwd_block(const FwdParams& p) {
  using Target = typename Config::Target;
  using Product = flash_dist::Product<Target, typename Config::T>;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int SLICE = Config::SLICE;
  constexpr int MT = Config::ROW_TILES;
  constexpr int NT = BLOCK_N / 8;
  using Rows = FloatRows<HEAD_DIM>;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sQ = shared_address(smem.q);
  const uint32_t sK = shared_address(smem.k);
  const uint32_t sV = shared_address(smem.v);
  const WarpPlace<Config> warp;

  const auto& work = smem.work;
  {
    const FwdBlock block(p, BLOCK_M);
    const Sequence sequence(p, block.batch);
    if (sequence.uncovered_q) fill_uncovered<Config, 4>(p, block);
    if (block.row0 >= sequence.seqlen_q) return;
    const F32FwdWork<BLOCK_M, BLOCK_N> mine(p, block, sequence);
    if (threadIdx.x == 0) smem.work = mine;
    __syncthreads();
  }

  OperandCopy<Config, BLOCK_N, HEAD_DIM> copy_k, copy_v;
  const auto fetch_k = [&](int key0) {
    copy_k.fetch(sK, work.k + key0 * p.k.row, p.k.row,
                 {work.keys.first - key0, work.keys.end - key0}, p.head_dim);
  };
  const auto fetch_v = [&](int key0) {
    copy_v.fetch(sV, work.v + key0 * p.v.row, p.v.row,
                 {work.keys.first - key0, work.keys.end - key0}, p.head_dim_v);
  };

  int j = work.blocks.end - 1;
  if (j >= work.blocks.begin) {
    OperandCopy<Config, BLOCK_M, HEAD_DIM> copy_q;
    copy_q.fetch(sQ, work.q, p.q.row, {0, work.rows}, p.head_dim);
    copy_q.land(sQ);
    fetch_k(work.blocks.key0(j));
    copy_k.land(sK);
    commit_copies<Target>();
  }

  Accumulator<MT, SLICE / 8> o;
  o.clear();
  SoftmaxState<MT> state;
  state.clear();
  const float scale_log2 = p.scores.scale * LOG2_E;

  const auto step = [&](auto masked) {
    wait_for_copies<Target>();  // K(j) has landed; all warps have read V(j + 1)
    fetch_v(work.blocks.key0(j));
    commit_copies<Target>();

    // S = Q @ K.T                                        [ROWS, BLOCK_N] per warp
    Accumulator<MT, NT> s;
    s.clear();
    Product::template scores<HEAD_DIM, SLICE, STEPS_AHEAD<Target>, Queries::A>(
        s, Rows::at(sQ, warp.row0(), warp.column0()), Rows::at(sK, 0, warp.column0()));
    sum_slices(s, warp, shared_address(smem.exchange));

    copy_v.land(sV);
    wait_for_copies<Target>();  // V(j) has landed; all warps have read K(j)
    if (j > work.blocks.begin) fetch_k(work.blocks.key0(j - 1));
    commit_copies<Target>();

    if constexpr (decltype(masked)::value) {
      constexpr Tanh TANH = Config::DROPS ? Tanh::NONE : Tanh::EXACT;
      modify_and_mask<TANH, typename Config::T, Config::DROPS>(s, p, work, warp.row0(), j);
    }
    online_softmax<Offsets::ROUNDED>(s, o, state, scale_log2);
    if constexpr (Config::DROPS) {
      drop(s, dropout_of(p), dropout_place(p, BLOCK_M, warp.row0(), work.blocks.key0(j)));
    }

    // O += P @ V                                         [ROWS, SLICE] per warp
    Product::template ab<HEAD_DIM>(o, s, Rows::at(sV, 0, warp.column0()));
    if (j > work.blocks.begin) copy_k.land(sK);
  };
  for_key_blocks<Config::DROPS>(p, work.blocks, j, step);

  const FwdBlock block(p, BLOCK_M);
  const Sequence sequence(p, block.batch);
  if constexpr (Config::DROPS) o.scale(dropout_of(p).scale);
  store_f32_output<Config>(p, block, sequence, warp, o, state, scale_log2);
}

}  // namespace flash_dist

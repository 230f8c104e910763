// Forward attention on mma.sync: out = softmax(q @ k.T * softmax_scale) @ v and lse, one block per
// tile of query rows.
//
// Grid      x = query tile, batch and query head (longest causal tiles of a head first).
// Block     WARPS warps, each owning ROWS query rows over the whole head_dim.
// Shared    Q tile (later the output tile), one K tile, one V tile.
// Pipeline  V(j) arrives while S = Q @ K(j).T is computed, K(j - 1) while the softmax and P @ V(j)
// run. Key tiles are
//           walked from the last to the first, so the tiles that need a mask come first and the
//           long loop has none.
#pragma once

#include "core/mask.cuh"
#include "core/schedule.cuh"
#include "core/views.cuh"
#include "mma/fragments.cuh"

namespace flash_dist {

// Running maximum and sum of the two rows that a lane holds in each 16-row tile.
template <int MT>
struct SoftmaxState {
  float row_max[MT][2];
  float row_sum[MT][2];  // this lane's columns only, until finish()
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// S -> P = exp2(S * scale_log2 - row_max), rescaling O and the sums when a row's maximum grows.
template <int MT, int NT, int OT>
__device__ __forceinline__ void online_softmax(Accumulator<MT, NT>& s, Accumulator<MT, OT>& o,
                                               SoftmaxState<MT>& state, float scale_log2) {
  float rescale[MT][2];
  bool grown = false;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = state.row_max[m][h];
#pragma unroll
      for (int n = 0; n < NT; ++n) top = fmaxf(top, fmaxf(s.x[m][n][2 * h], s.x[m][n][2 * h + 1]));
      top = quad_max(top);
      // NOTE: a row without a visible key so far keeps -inf; 0 instead avoids inf - inf.
      const float offset = top == -INFINITY ? 0.0f : top * scale_log2;
      rescale[m][h] = exp2_approx(fmaf(state.row_max[m][h], scale_log2, -offset));
      grown |= top != state.row_max[m][h];
      state.row_max[m][h] = top;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s.x[m][n][2 * h + e];
          x = exp2_approx(fmaf(x, scale_log2, -offset));
          sum += x;
        }
      state.row_sum[m][h] = fmaf(state.row_sum[m][h], rescale[m][h], sum);
    }
  // Multiplying by 1 changes nothing, so the skip does not change a bit.
  if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < OT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) o.x[m][n][i] *= rescale[m][i / 2];
  }
}

// The query tile, head and batch of this block.
struct FwdBlock {
  int tile, batch_head, batch, head_kv, member;

  __device__ __forceinline__ FwdBlock(const FwdParams& p, int block_m) {
    const int q_tiles = (p.seqlen_q + block_m - 1) / block_m;
    const int num_heads_q = p.num_heads_kv * p.group;
    const BlockPlace place(fresh_block(), q_tiles, p.batch * num_heads_q, p.heads_together);
    batch_head = place.group;
    tile = q_tiles - 1 - place.tile;
    batch = batch_head / num_heads_q;
    const int head = batch_head - batch * num_heads_q;
    head_kv = head / p.group;
    member = head - head_kv * p.group;
  }
};

template <class Config>
__device__ __forceinline__ void fwd_block(const FwdParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int MT = Config::ROW_TILES;
  constexpr int NT = BLOCK_N / 8;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sQ = shared_address(smem.q);
  const uint32_t sK = shared_address(smem.k);
  const uint32_t sV = shared_address(smem.v);

  const FwdBlock block(p, BLOCK_M);
  const int row0 = block.tile * BLOCK_M;
  const int warp_row0 = (threadIdx.x / 32) * Config::ROWS;
  const int lane = threadIdx.x % 32;
  const uint16_t* gQ = head_begin(p.q, block.batch, block.head_kv, block.member) + row0 * p.q.row;
  const uint16_t* gK = head_begin(p.k, block.batch, block.head_kv, 0);
  const uint16_t* gV = head_begin(p.v, block.batch, block.head_kv, 0);

  const Mask mask{p.seqlen_q, p.seqlen_k, p.causal};
  const int last_row = min(row0 + BLOCK_M, p.seqlen_q) - 1;
  const int tiles_end =
      (mask.key_end(last_row) + BLOCK_N - 1) / BLOCK_N;  // beyond: nothing visible
  const int tiles_full = mask.key_end(row0) / BLOCK_N;   // before: all visible

  Accumulator<MT, HEAD_DIM / 8> o;
  o.clear();
  SoftmaxState<MT> state;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) state.row_max[m][h] = -INFINITY, state.row_sum[m][h] = 0.0f;

  const Operand<HEAD_DIM> a_q = Operand<HEAD_DIM>::a(sQ + warp_row0 * HEAD_DIM * 2);
  const Operand<HEAD_DIM> b_k = Operand<HEAD_DIM>::b(sK);
  const Operand<HEAD_DIM> b_v = Operand<HEAD_DIM>::b_trans(sV);
  const float scale_log2 = p.softmax_scale * LOG2_E;

  TileCopy<Target, BLOCK_N, HEAD_DIM, Config::THREADS> copy_k;
  TileCopy<Target, BLOCK_N, HEAD_DIM, Config::THREADS> copy_v;
  const auto fetch_k = [&](int j) {
    copy_k.fetch(sK, gK + static_cast<int64_t>(j) * BLOCK_N * p.k.row, p.k.row,
                 p.seqlen_k - j * BLOCK_N);
  };
  const auto fetch_v = [&](int j) {
    copy_v.fetch(sV, gV + static_cast<int64_t>(j) * BLOCK_N * p.v.row, p.v.row,
                 p.seqlen_k - j * BLOCK_N);
  };
  const auto arrive = [&] {
    if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
    __syncthreads();
  };

  if (tiles_end > 0) {
    TileCopy<Target, BLOCK_M, HEAD_DIM, Config::THREADS> copy_q;
    copy_q.fetch(sQ, gQ, p.q.row, p.seqlen_q - row0);
    copy_q.land(sQ);
    fetch_k(tiles_end - 1);
    copy_k.land(sK);
    if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();
  }

  const auto step = [&](int j, auto masked) {
    arrive();  // K(j) is in; everybody is done with V(j + 1)
    fetch_v(j);
    if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();

    // S = Q @ K.T                                        [ROWS, BLOCK_N] per warp
    Accumulator<MT, NT> s;
    s.clear();
    gemm_abt<Target, T, HEAD_DIM, Target::UNROLL, MT, NT>(s, a_q, b_k, 0);

    copy_v.land(sV);
    arrive();  // V(j) is in; everybody is done with K(j)
    if (j > 0) fetch_k(j - 1);
    if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();

    if constexpr (decltype(masked)::value) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int end = mask.key_end(row0 + warp_row0 + m * 16 + h * 8 + lane / 4) - j * BLOCK_N -
                          (lane % 4) * 2;
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              if (n * 8 + e >= end) s.x[m][n][2 * h + e] = -INFINITY;
        }
    }
    online_softmax(s, o, state, scale_log2);

    // O += P @ V                                         [ROWS, HEAD_DIM] per warp
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      uint32_t rP[MT][4];
      to_a_operand<Target, T>(rP, s, k);
      gemm_ab_step<Target, T, HEAD_DIM, MT>(o, rP, b_v, k * 16);
    }
    if (j > 0) copy_k.land(sK);
  };

  int j = tiles_end - 1;
  for (; j >= tiles_full; --j) step(j, std::true_type{});
  for (; j >= 0; --j) step(j, std::false_type{});

  // O / sum, lse = max * scale + ln(sum)
  const FwdBlock again(p, BLOCK_M);
  const int first_row = again.tile * BLOCK_M + warp_row0;
  const int rows_left = p.seqlen_q - first_row;
  float* gLse = p.lse + static_cast<int64_t>(again.batch_head) * p.seqlen_q + first_row;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(state.row_sum[m][h]);
      const bool empty = state.row_max[m][h] == -INFINITY;  // no visible key
      const float inverse = empty ? 0.0f : 1.0f / sum;
      const int row = m * 16 + h * 8 + lane / 4;
      if (lane % 4 == 0 && row < rows_left) {
        gLse[row] = empty ? -INFINITY : fmaf(state.row_max[m][h], p.softmax_scale, logf(sum));
      }
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        o.x[m][n][2 * h] *= inverse;
        o.x[m][n][2 * h + 1] *= inverse;
      }
    }
  store_rows<Target, T, HEAD_DIM, MT>(
      o, sQ + warp_row0 * HEAD_DIM * 2,
      head_begin(p.out, again.batch, again.head_kv, again.member) + first_row * p.out.row,
      p.out.row, rows_left);
}

}  // namespace flash_dist

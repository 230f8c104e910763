// dK and dV, and dS for the dQ product: the key side of the backward. No atomics; a block owns its
// keys.
//
//   S^T = K @ Q.T   P^T = exp2(S^T - lse)   dV += P^T @ dO   dP^T = V @ dO.T   dS^T = P^T (dP^T -
//   delta)   dK += dS^T @ Q
//
// Grid      x = key tile, (batch, kv head) unit of the chunk, group split.
// Block     WARPS warps, each owning ROWS keys over the whole head_dim: P^T and dS^T stay in
// registers as A operands. Shared    K and V (for the whole life of the block), STAGES stages of Q,
// dO, lse and delta. Pipeline  the query tiles of every query head of the split, in ascending
// order: this is the order of summation.
#pragma once

#include "core/entry.h"
#include "core/mask.cuh"
#include "core/pipeline.cuh"
#include "core/schedule.cuh"
#include "core/views.cuh"
#include "mma/bwd/config.h"
#include "mma/fragments.cuh"

namespace flash_dist {

// COUNT floats of lse and as many of delta into neighbouring arrays, 16 bytes per thread.
template <class Target, int COUNT>
struct StatCopy {
  uint4 staged;

  __device__ __forceinline__ void fetch(uint32_t smem, const float* lse, const float* delta) {
    const int i = fresh_thread() * 4;
    if (i >= 2 * COUNT) return;
    const float* src = i < COUNT ? lse + i : delta + (i - COUNT);
    if constexpr (Target::HAS_CP_ASYNC) {
      cp_async_16(smem + i * 4, src, true);
    } else {
      staged = load_global_16(src);
    }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (!Target::HAS_CP_ASYNC) {
      const int i = fresh_thread() * 4;
      if (i < 2 * COUNT) store_shared_16(smem + i * 4, staged);
    }
  }
};

// fp32 rows of a warp's accumulator, for the partial sums of the group split.
template <int MT, int NT>
__device__ __forceinline__ void store_partial(const Accumulator<MT, NT>& c, float* dst,
                                              int row_limit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + lane / 4;
      if (row < row_limit) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          *reinterpret_cast<float2*>(dst + row * (NT * 8) + n * 8 + (lane % 4) * 2) =
              float2{c.x[m][n][2 * h], c.x[m][n][2 * h + 1]};
        }
      }
    }
}

// The key tile, unit and split of this block.
struct DkdvBlock {
  int key0, unit, batch, head_kv, split;

  __device__ __forceinline__ DkdvBlock(const BwdParams& p, int block_n) {
    const int tiles = (p.key_end - p.key_begin + block_n - 1) / block_n;
    const BlockPlace place(fresh_block(), tiles, p.units * p.group_split, p.heads_together);
    key0 = p.key_begin + place.tile * block_n;
    unit = place.group / p.group_split;
    split = place.group - unit * p.group_split;
    batch = (p.unit_begin + unit) / p.num_heads_kv;
    head_kv = p.unit_begin + unit - batch * p.num_heads_kv;
  }
};

template <class Config>
__device__ __forceinline__ void dkdv_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int MT = Config::ROW_TILES;
  constexpr int SUB_M = Config::SUB_M;
  constexpr int NT = SUB_M / 8;

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

  const DkdvBlock block(p, BLOCK_N);
  const int warp_row0 = (threadIdx.x / 32) * Config::ROWS;
  const int lane = threadIdx.x % 32;
  const int members = p.group / p.group_split;
  const int member0 = block.split * members;

  const Mask mask{p.seqlen_q, p.seqlen_k, p.causal};
  const DsLayout layout(p.seqlen_q, p.seqlen_k, p.causal);
  constexpr int TILES_PER_DS = DS_TILE / BLOCK_M;
  const int tile_begin = layout.query_begin(block.key0 / DS_TILE) * TILES_PER_DS;
  const int tile_count = layout.query_tiles * TILES_PER_DS - tile_begin;

  // Where this warp's 16-byte pieces of dS go; a warp's keys lie in one key tile of the layout.
  const int ds_key_tile = (block.key0 + warp_row0) / DS_TILE;
  const int ds_query_begin = layout.query_begin(ds_key_tile);
  uint8_t* gDs = nullptr;
  if (p.ds != nullptr && ds_key_tile * DS_TILE < p.key_end) {
    const int64_t head = static_cast<int64_t>(block.unit) * p.group + member0;
    const int64_t tiles = head * p.ds_tiles_per_head +
                          layout.slots(p.key_begin / DS_TILE, ds_key_tile) - ds_query_begin;
    gDs = static_cast<uint8_t*>(p.ds) + tiles * DS_TILE_BYTES +
          (warp_row0 % DS_TILE) / 16 * 4 * DS_BLOCK_BYTES + lane * 16;
  }

  TileCopy<Target, BLOCK_M, HEAD_DIM, Config::THREADS> copy_q, copy_dout;
  StatCopy<Target, BLOCK_M> copy_stats;
  const auto fetch = [&](int i, int s) {
    const int member = member0 + i / tile_count;
    const int row0 = (tile_begin + i % tile_count) * BLOCK_M;
    const int limit = p.seqlen_q - row0;
    copy_q.fetch(sQ(s), head_begin(p.q, block.batch, block.head_kv, member) + row0 * p.q.row,
                 p.q.row, limit);
    copy_dout.fetch(sDout(s),
                    head_begin(p.dout, block.batch, block.head_kv, member) + row0 * p.dout.row,
                    p.dout.row, limit);
    const int64_t head =
        (static_cast<int64_t>(block.batch) * p.num_heads_kv + block.head_kv) * p.group + member;
    const int64_t row = head * p.rows_padded + row0;
    copy_stats.fetch(sLse(s), p.lse_log2 + row, p.delta + row);
  };
  const auto land = [&](int s) {
    copy_q.land(sQ(s));
    copy_dout.land(sDout(s));
    copy_stats.land(sLse(s));
  };

  Accumulator<MT, HEAD_DIM / 8> dk, dv;
  dk.clear();
  dv.clear();
  const float scale_log2 = p.softmax_scale * LOG2_E;

  const auto compute = [&](int i, int s) {
    const int row0 = (tile_begin + i % tile_count) * BLOCK_M;
    const bool masked = block.key0 + BLOCK_N > mask.key_end(row0);
    const Operand<HEAD_DIM> a_k = Operand<HEAD_DIM>::a(sK + warp_row0 * HEAD_DIM * 2);
    const Operand<HEAD_DIM> a_v = Operand<HEAD_DIM>::a(sV + warp_row0 * HEAD_DIM * 2);
#pragma unroll 1
    for (int sub = 0; sub < BLOCK_M; sub += SUB_M) {
      // S^T = K @ Q.T                                    [ROWS, SUB_M] per warp
      Accumulator<MT, NT> pt;
      pt.clear();
      gemm_abt<Target, T, HEAD_DIM, Config::UNROLL_S, MT, NT>(pt, a_k, Operand<HEAD_DIM>::b(sQ(s)),
                                                              sub);
      if (masked) {
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int end = mask.key_end(row0 + sub + n * 8 + (lane % 4) * 2 + e) - block.key0 -
                            warp_row0 - lane / 4;
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
              for (int h = 0; h < 2; ++h)
                if (m * 16 + h * 8 >= end) pt.x[m][n][2 * h + e] = -INFINITY;
          }
      }
      // P^T = exp2(S^T * scale - lse)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 lse = load_shared_8(sLse(s) + (sub + n * 8 + (lane % 4) * 2) * 4);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            pt.x[m][n][2 * h] = exp2_approx(fmaf(pt.x[m][n][2 * h], scale_log2, -lse.x));
            pt.x[m][n][2 * h + 1] = exp2_approx(fmaf(pt.x[m][n][2 * h + 1], scale_log2, -lse.y));
          }
      }
      // dV += P^T @ dO                                   [ROWS, HEAD_DIM]
#pragma unroll
      for (int k = 0; k < SUB_M / 16; ++k) {
        uint32_t rP[MT][4];
        to_a_operand<Target, T>(rP, pt, k);
        gemm_ab_step<Target, T, HEAD_DIM, MT>(dv, rP, Operand<HEAD_DIM>::b_trans(sDout(s)),
                                              sub + k * 16);
      }
      // dP^T = V @ dO.T                                  [ROWS, SUB_M]
      Accumulator<MT, NT> dpt;
      dpt.clear();
      gemm_abt<Target, T, HEAD_DIM, Config::UNROLL_DP, MT, NT>(dpt, a_v,
                                                               Operand<HEAD_DIM>::b(sDout(s)), sub);
      // dS^T = P^T * (dP^T - delta)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 delta = load_shared_8(sDelta(s) + (sub + n * 8 + (lane % 4) * 2) * 4);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            dpt.x[m][n][2 * h] = pt.x[m][n][2 * h] * (dpt.x[m][n][2 * h] - delta.x);
            dpt.x[m][n][2 * h + 1] = pt.x[m][n][2 * h + 1] * (dpt.x[m][n][2 * h + 1] - delta.y);
          }
      }
      // dK += dS^T @ Q                                   [ROWS, HEAD_DIM], and dS^T to the
      // workspace
      const int ds_query_tile = (row0 + sub) / DS_TILE;
      const bool spill = gDs != nullptr && ds_query_tile >= ds_query_begin;
      uint8_t* dst = gDs + (i / tile_count * p.ds_tiles_per_head + ds_query_tile) * DS_TILE_BYTES +
                     (row0 + sub) % DS_TILE / 16 * DS_BLOCK_BYTES;
#pragma unroll
      for (int k = 0; k < SUB_M / 16; ++k) {
        uint32_t rDs[MT][4];
        to_a_operand<Target, T>(rDs, dpt, k);
        if (spill) {
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            store_global_16(dst + (m * 4 + k) * DS_BLOCK_BYTES,
                            {rDs[m][0], rDs[m][1], rDs[m][2], rDs[m][3]});
          }
        }
        gemm_ab_step<Target, T, HEAD_DIM, MT>(dk, rDs, Operand<HEAD_DIM>::b_trans(sQ(s)),
                                              sub + k * 16);
      }
    }
  };

  {
    TileCopy<Target, BLOCK_N, HEAD_DIM, Config::THREADS> copy;
    const int limit = p.seqlen_k - block.key0;
    copy.fetch(sK, head_begin(p.k, block.batch, block.head_kv, 0) + block.key0 * p.k.row, p.k.row,
               limit);
    copy.land(sK);
    copy.fetch(sV, head_begin(p.v, block.batch, block.head_kv, 0) + block.key0 * p.v.row, p.v.row,
               limit);
    copy.land(sV);
  }
  run_pipeline<Target, Config::STAGES>(tile_count * members, fetch, land, compute);
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  __syncthreads();  // without any query tile K and V may still be arriving

  const DkdvBlock again(p, BLOCK_N);
  const int row0 = again.key0 + warp_row0;
  const int limit = p.seqlen_k - row0;
  if (p.group_split > 1) {
    const int64_t units = static_cast<int64_t>(p.batch) * p.num_heads_kv;
    const int64_t row = (again.split * units + p.unit_begin + again.unit) * p.seqlen_k + row0;
    store_partial(dk, p.dk_partial + row * HEAD_DIM, limit);
    store_partial(dv, p.dv_partial + row * HEAD_DIM, limit);
  } else {
    dk.scale(p.softmax_scale);
    store_rows<Target, T, HEAD_DIM, MT>(
        dk, sK + warp_row0 * HEAD_DIM * 2,
        head_begin(p.dk, again.batch, again.head_kv, 0) + row0 * p.dk.row, p.dk.row, limit);
    store_rows<Target, T, HEAD_DIM, MT>(
        dv, sV + warp_row0 * HEAD_DIM * 2,
        head_begin(p.dv, again.batch, again.head_kv, 0) + row0 * p.dv.row, p.dv.row, limit);
  }
}

template <class Config>
cudaError_t launch_dkdv(const void* kernel, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const BwdParams*>(params);
  const int64_t tiles = (p.key_end - p.key_begin + Config::BLOCK_N - 1) / Config::BLOCK_N;
  return launch_1d<Config>(kernel, params, tiles * p.units * p.group_split, stream);
}

}  // namespace flash_dist

// Row statistics of the backward: delta = rowsum(dout * out) - dlse, and lse in base 2 with +inf
// where a row has no key (so that exp2(s - lse) is 0 there) and for the padding rows.
//
// Grid      x = tile of rows, padded to STATISTICS_ALIGNMENT, of every batch entry and query head.
// Block     WARPS warps; LANES_PER_ROW lanes share a row, 16 bytes at a time.
#pragma once

#include "core/entry.h"
#include "core/sequence.cuh"
#include "core/target.h"
#include "core/tile.cuh"
#include "core/views.cuh"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DeltaConfig
    : Config<DeltaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<DeltaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V>;
  static constexpr int LANES_PER_ROW = lanes_per_row(HEAD_DIM / 8, 256);
  static constexpr int BLOCK_ROWS = Base::THREADS / LANES_PER_ROW;
  static constexpr int SMEM_BYTES = 0;
  static_assert(STATISTICS_ALIGNMENT % BLOCK_ROWS == 0);
};

__host__ __device__ constexpr int padded_rows(int rows) {
  return (rows + STATISTICS_ALIGNMENT - 1) / STATISTICS_ALIGNMENT * STATISTICS_ALIGNMENT;
}

template <class Config>
__device__ __forceinline__ void delta_block(const DeltaParams& p) {
  constexpr int LANES = Config::LANES_PER_ROW;
  const int tiles = padded_rows(p.seqlen_q) / Config::BLOCK_ROWS;
  const int batch_head = blockIdx.x / tiles;
  const int num_heads_q = p.num_heads_kv * p.group;
  const int batch = batch_head / num_heads_q;
  const int head = batch_head - batch * num_heads_q;
  const int row = (blockIdx.x % tiles) * Config::BLOCK_ROWS + threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;

  int q0 = 0;
  int seqlen_q = p.seqlen_q;
  if (p.packing.cu_seqlens_q != nullptr) {
    q0 = p.packing.cu_seqlens_q[batch];
    seqlen_q = min(p.packing.cu_seqlens_q[batch + 1] - q0, p.seqlen_q);
    if (row >= padded_rows(seqlen_q)) return;  // whole warps: BLOCK_ROWS divides the padding
  }

  float sum = 0.0f;
  if (row < seqlen_q) {
#pragma unroll
    for (int c = 0; c < Config::HEAD_DIM / 8 / LANES; ++c) {
      const int chunk = c * LANES + lane;
      if (chunk * 8 >= p.head_dim_v) break;
      const auto load = [&](const View& view) {
        return load_global_16(head_begin(view, batch, head / p.group, head % p.group) +
                              static_cast<int64_t>(q0 + row) * view.row + chunk * 8);
      };
      const uint4 o = load(p.out);
      const uint4 d = load(p.dout);
      const uint32_t o_words[4] = {o.x, o.y, o.z, o.w};
      const uint32_t d_words[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack<typename Config::T>(o_words[i]);
        const float2 b = unpack<typename Config::T>(d_words[i]);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
      }
    }
  }
#pragma unroll
  for (int i = LANES / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);

  if (lane == 0) {
    float lse = -INFINITY;
    if (row < seqlen_q) {
      const int64_t i = lse_begin(p, batch, head, q0) + row;
      lse = p.lse[i];
      if (p.dlse != nullptr) sum -= p.dlse[i];
    }
    const int64_t i = statistics_begin(p, batch, head, q0) + row;
    p.lse_log2[i] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
    p.delta[i] = lse == -INFINITY ? 0.0f : sum;
  }
}

template <class Config>
cudaError_t launch_delta(const void* kernel, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const DeltaParams*>(params);
  const int64_t heads = static_cast<int64_t>(p.batch) * p.num_heads_kv * p.group;
  return launch_1d<Config>(kernel, params, heads * (padded_rows(p.seqlen_q) / Config::BLOCK_ROWS),
                           stream);
}

}  // namespace flash_dist

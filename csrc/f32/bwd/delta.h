// Row statistics of the fp32 backward: those of mma/bwd/delta.h, from floats.
//
// Grid      x = tile of rows, padded to STATISTICS_ALIGNMENT, of every batch entry and query head.
// Block     WARPS warps; LANES_PER_ROW lanes share a row, 16 bytes at a time.
#pragma once

#include "f32/tile.cuh"
#include "mma/bwd/delta.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct F32DeltaConfig
    : Config<F32DeltaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<F32DeltaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V>;
  static constexpr int LANES_PER_ROW = HEAD_DIM / 4 < 32 ? HEAD_DIM / 4 : 32;
  static constexpr int BLOCK_ROWS = Base::THREADS / LANES_PER_ROW;
  static constexpr int SMEM_BYTES = 0;
  static_assert(STATISTICS_ALIGNMENT % BLOCK_ROWS == 0);
};

template <class Config>
__device__ __forceinline__ void f32_delta_block(const DeltaParams& p) {
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
    seqlen_q = p.packing.cu_seqlens_q[batch + 1] - q0;
    if (row >= padded_rows(seqlen_q)) return;  // whole warps: BLOCK_ROWS divides the padding
  }

  float sum = 0.0f;
  if (row < seqlen_q) {
#pragma unroll
    for (int c = 0; c < Config::HEAD_DIM / 4 / LANES; ++c) {
      const int column = (c * LANES + lane) * 4;
      if (column >= p.head_dim_v) break;
      const auto load = [&](const View& view) {
        return load_global_16(float_head_begin(view, batch, head / p.group, head % p.group) +
                              static_cast<int64_t>(q0 + row) * view.row + column);
      };
      const uint4 o = load(p.out);
      const uint4 d = load(p.dout);
      sum = fmaf(__uint_as_float(o.x), __uint_as_float(d.x), sum);
      sum = fmaf(__uint_as_float(o.y), __uint_as_float(d.y), sum);
      sum = fmaf(__uint_as_float(o.z), __uint_as_float(d.z), sum);
      sum = fmaf(__uint_as_float(o.w), __uint_as_float(d.w), sum);
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

}  // namespace flash_dist

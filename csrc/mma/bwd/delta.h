// Row statistics of the backward: delta = rowsum(dout * out) - dlse, and lse in base 2 with +inf
// where a row has no key (so that exp2(s - lse) is 0 there) and for the padding rows.
//
// Grid      x = tile of rows, over rows_padded of every batch and query head.
// Block     WARPS warps; HEAD_DIM / 8 lanes share a row, 16 bytes each.
#pragma once

#include "core/entry.h"
#include "core/target.h"
#include "core/views.cuh"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

template <class Target_, class T_, int HEAD_DIM_, int PLAN_>
struct DeltaConfig : DeltaPlan<HEAD_DIM_, PLAN_> {
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int THREADS = DeltaPlan<HEAD_DIM_, PLAN_>::WARPS * 32;
  static constexpr int LANES_PER_ROW = HEAD_DIM / 8;
  static constexpr int BLOCK_ROWS = THREADS / LANES_PER_ROW;
  static constexpr int SMEM_BYTES = 0;
};

template <class Config>
__device__ __forceinline__ void delta_block(const DeltaParams& p) {
  constexpr int LANES = Config::LANES_PER_ROW;
  const int tiles = p.rows_padded / Config::BLOCK_ROWS;
  const int batch_head = blockIdx.x / tiles;
  const int head = batch_head % (p.num_heads_kv * p.group);
  const int batch = batch_head / (p.num_heads_kv * p.group);
  const int row = (blockIdx.x % tiles) * Config::BLOCK_ROWS + threadIdx.x / LANES;
  const int chunk = threadIdx.x % LANES;

  float sum = 0.0f;
  if (row < p.seqlen_q) {
    const auto load = [&](const View& view) {
      return load_global_16(head_begin(view, batch, head / p.group, head % p.group) +
                            row * view.row + chunk * 8);
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
#pragma unroll
  for (int i = LANES / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);

  if (chunk == 0) {
    float lse = -INFINITY;
    if (row < p.seqlen_q) {
      const int64_t i = static_cast<int64_t>(batch_head) * p.seqlen_q + row;
      lse = p.lse[i];
      if (p.dlse != nullptr) sum -= p.dlse[i];
    }
    const int64_t i = static_cast<int64_t>(batch_head) * p.rows_padded + row;
    p.lse_log2[i] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
    p.delta[i] = lse == -INFINITY ? 0.0f : sum;
  }
}

template <class Config>
cudaError_t launch_delta(const void* kernel, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const DeltaParams*>(params);
  const int64_t rows = static_cast<int64_t>(p.batch) * p.num_heads_kv * p.group * p.rows_padded;
  return launch_1d<Config>(kernel, params, rows / Config::BLOCK_ROWS, stream);
}

}  // namespace flash_dist

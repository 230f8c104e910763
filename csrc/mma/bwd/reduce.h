// Adds the fp32 partials of the group split in ascending order and rounds the sum once.
//
// Grid      x = tile of rows over every batch and kv head. A thread owns 8 columns of one row.
#pragma once

#include "core/entry.h"
#include "core/target.h"
#include "core/views.cuh"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

template <class Target_, class T_, int HEAD_DIM_, int PLAN_>
struct ReduceConfig : ReducePlan<HEAD_DIM_, PLAN_> {
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int THREADS = ReducePlan<HEAD_DIM_, PLAN_>::WARPS * 32;
  static constexpr int LANES_PER_ROW = HEAD_DIM / 8;
  static constexpr int BLOCK_ROWS = THREADS / LANES_PER_ROW;
  static constexpr int SMEM_BYTES = 0;
};

template <class Config>
__device__ __forceinline__ void reduce_block(const ReduceParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  const int tiles = (p.seqlen_k + Config::BLOCK_ROWS - 1) / Config::BLOCK_ROWS;
  const int unit = blockIdx.x / tiles;
  const int row = (blockIdx.x % tiles) * Config::BLOCK_ROWS + threadIdx.x / Config::LANES_PER_ROW;
  const int column = (threadIdx.x % Config::LANES_PER_ROW) * 8;
  if (row >= p.seqlen_k) return;

  const int64_t split_stride =
      static_cast<int64_t>(p.batch) * p.num_heads_kv * p.seqlen_k * Config::HEAD_DIM;
  const float* src =
      p.partial + (static_cast<int64_t>(unit) * p.seqlen_k + row) * Config::HEAD_DIM + column;
  float sum[8] = {};
  for (int i = 0; i < p.splits; ++i, src += split_stride) {
    const float4 low = *reinterpret_cast<const float4*>(src);
    const float4 high = *reinterpret_cast<const float4*>(src + 4);
    sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
    sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = pack<Target, T>(sum[2 * i] * p.scale, sum[2 * i + 1] * p.scale);
  uint16_t* dst =
      head_begin(p.out, unit / p.num_heads_kv, unit % p.num_heads_kv, 0) + row * p.out.row + column;
  store_global_16(dst, {words[0], words[1], words[2], words[3]});
}

template <class Config>
cudaError_t launch_reduce(const void* kernel, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const ReduceParams*>(params);
  const int64_t tiles = (p.seqlen_k + Config::BLOCK_ROWS - 1) / Config::BLOCK_ROWS;
  return launch_1d<Config>(kernel, params, tiles * p.batch * p.num_heads_kv, stream);
}

}  // namespace flash_dist

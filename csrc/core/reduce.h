// Adds the fp32 partial sums of dK, and those of dV, in ascending order of the splits, and rounds
// each result once.
//
// Grid      x = tile of rows, counted over all batch entries and kv heads, of dK and then of dV. A
//           thread owns 8 columns of one row.
#pragma once

#include "core/config.h"
#include "core/sequence.cuh"
#include "native/entry.h"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct ReduceConfig
    : Config<ReducePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<ReducePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V>;
  static constexpr int LANES_PER_ROW = HEAD_DIM / 8;
  static constexpr int BLOCK_ROWS = Base::THREADS / LANES_PER_ROW;  // left-over threads do nothing
  static constexpr int SMEM_BYTES = 0;
};

template <class Config>
__device__ __forceinline__ void reduce_block(const ReduceParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  const int tiles = (p.seqlen_k + Config::BLOCK_ROWS - 1) / Config::BLOCK_ROWS;
  const int blocks = tiles * p.batch * p.num_heads_kv;  // blocks per sum (dK or dV)
  const int number = blockIdx.x;
  const bool of_v = number >= blocks;
  const ReduceParams::Sum& of = p.sums[of_v];
  const int block = number - (of_v ? blocks : 0);
  const int unit = block / tiles;
  const int in_tile = threadIdx.x / Config::LANES_PER_ROW;
  const int row = block % tiles * Config::BLOCK_ROWS + in_tile;
  const int column = (threadIdx.x % Config::LANES_PER_ROW) * 8;
  const int batch = unit / p.num_heads_kv;
  int k0 = 0;
  int seqlen_k = p.seqlen_k;
  if (p.packing.cu_seqlens_k != nullptr) {
    const DocumentRows k(p.packing.cu_seqlens_k, batch, p.batch, p.total_k, p.seqlen_k);
    k0 = k.begin;
    seqlen_k = k.length;
  }
  if (in_tile >= Config::BLOCK_ROWS || row >= seqlen_k || column >= of.columns) return;

  const int64_t split_stride =
      static_cast<int64_t>(p.batch) * p.num_heads_kv * p.seqlen_k * of.padded;
  const float* src =
      of.partial + (static_cast<int64_t>(unit) * p.seqlen_k + row) * of.padded + column;
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
    words[i] = pack<Target, T>(sum[2 * i] * of.scale, sum[2 * i + 1] * of.scale);
  uint16_t* dst = head_begin(of.out, batch, unit % p.num_heads_kv, 0) +
                  static_cast<int64_t>(k0 + row) * of.out.row + column;
  store_global_16(dst, {words[0], words[1], words[2], words[3]});
}

template <int ROWS>
cudaError_t launch_reduce_blocks(const KernelEntry& entry, const void* params,
                                 cudaStream_t stream) {
  const auto& p = *static_cast<const ReduceParams*>(params);
  const int64_t tiles = (p.seqlen_k + ROWS - 1) / ROWS;
  return launch_1d(entry, params, 2 * tiles * p.batch * p.num_heads_kv, stream);
}

template <class Config>
constexpr auto launch_reduce = &launch_reduce_blocks<Config::BLOCK_ROWS>;

}  // namespace flash_dist

// Adds the partial sums of dK, and those of dV, in ascending order of the splits.
//
// Grid      x = tile of rows, counted over all batch entries and kv heads, of dK and then of dV. A
//           thread owns 4 columns of one row.
#pragma once

#include "core/reduce.h"
#include "core/sequence.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct F32ReduceConfig
    : Config<F32ReducePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<F32ReducePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V>;
  static constexpr int LANES_PER_ROW = HEAD_DIM / 4;
  static constexpr int BLOCK_ROWS = Base::THREADS / LANES_PER_ROW;
  static constexpr int SMEM_BYTES = 0;
};

template <class Config>
__device__ __forceinline__ void f32_reduce_block(const ReduceParams& p) {
  const int tiles = (p.seqlen_k + Config::BLOCK_ROWS - 1) / Config::BLOCK_ROWS;
  const int blocks = tiles * p.batch * p.num_heads_kv;  // blocks per sum (dK or dV)
  const int number = blockIdx.x;
  const bool of_v = number >= blocks;
  const ReduceParams::Sum& of = p.sums[of_v];
  const int block = number - (of_v ? blocks : 0);
  const int unit = block / tiles;
  const int row = block % tiles * Config::BLOCK_ROWS + threadIdx.x / Config::LANES_PER_ROW;
  const int column = (threadIdx.x % Config::LANES_PER_ROW) * 4;
  const int batch = unit / p.num_heads_kv;
  int k0 = 0;
  int seqlen_k = p.seqlen_k;
  if (p.packing.cu_seqlens_k != nullptr) {
    const DocumentRows k(p.packing.cu_seqlens_k, batch, p.batch, p.total_k, p.seqlen_k);
    k0 = k.begin;
    seqlen_k = k.length;
  }
  if (row >= seqlen_k || column >= of.columns) return;

  const int64_t split_stride =
      static_cast<int64_t>(p.batch) * p.num_heads_kv * p.seqlen_k * of.padded;
  const float* src =
      of.partial + (static_cast<int64_t>(unit) * p.seqlen_k + row) * of.padded + column;
  float4 sum = {};
  for (int i = 0; i < p.splits; ++i, src += split_stride) {
    const float4 x = *reinterpret_cast<const float4*>(src);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  float* dst = head_begin<float>(of.out, batch, unit % p.num_heads_kv, 0) +
               static_cast<int64_t>(k0 + row) * of.out.row + column;
  *reinterpret_cast<float4*>(dst) = {sum.x * of.scale, sum.y * of.scale, sum.z * of.scale,
                                     sum.w * of.scale};
}

}  // namespace flash_dist

// Row statistics of the backward: delta = DS_SCALE * (rowsum(dout * out) - dlse), and lse in
// base 2. lse is +inf for padding rows and rows without a key, so that exp2(s - lse) is 0 there.
//
// Grid      x = query head (fastest: heads are adjacent in memory), tile of rows, batch entry. The
//           number of rows is padded to a multiple of STATISTICS_ALIGNMENT.
// Block     WARPS warps; LANES_PER_ROW lanes share a row, 16 bytes at a time.
#pragma once

#include "core/config.h"
#include "core/dot.cuh"
#include "core/ds_scale.h"
#include "core/schedule.cuh"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "core/uncovered.cuh"
#include "native/entry.h"
#include "plans.h"
#include "ptx/copy.cuh"

namespace flash_dist {

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int ELEMENT_BYTES_>
struct AnyDeltaConfig : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V>;
  static constexpr int ELEMENT_BYTES = ELEMENT_BYTES_;
  static constexpr int CHUNKS = HEAD_DIM * ELEMENT_BYTES / 16;  // 16-byte chunks per row
  static constexpr int LANES_PER_ROW = lanes_per_row(CHUNKS, Base::THREADS);
  static constexpr int BLOCK_ROWS = Base::THREADS / LANES_PER_ROW;
  static constexpr int SMEM_BYTES = 0;
  static_assert(STATISTICS_ALIGNMENT % BLOCK_ROWS == 0);
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DeltaConfig =
    AnyDeltaConfig<DeltaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, 2>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32DeltaConfig =
    AnyDeltaConfig<F32DeltaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, 4>;

__host__ __device__ constexpr int padded_rows(int rows) {
  return (rows + STATISTICS_ALIGNMENT - 1) / STATISTICS_ALIGNMENT * STATISTICS_ALIGNMENT;
}

// The work of a block: a tile of rows of one query head in one batch entry.
struct DeltaBlock {
  int tile, batch, head, head_kv, head_in_group;
  int q0, seqlen_q;  // first row and length of this batch entry
  bool uncovered;    // DocumentRows::uncovered of the queries or of the keys

  __device__ __forceinline__ explicit DeltaBlock(const DeltaParams& p)
      : q0(0), seqlen_q(p.seqlen_q), uncovered(false) {
    const int index = fresh_block();
    const int batch_tile = divide(index, p.by_num_heads_q);
    head = index - batch_tile * p.by_num_heads_q.divisor;
    batch = divide(batch_tile, p.by_tiles);
    tile = batch_tile - batch * p.by_tiles.divisor;
    head_kv = divide(head, p.by_group);
    head_in_group = head - head_kv * p.group;
    if (p.packing.cu_seqlens_q != nullptr) {
      const DocumentRows q(p.packing.cu_seqlens_q, batch, p.batch, p.total_q, p.seqlen_q);
      const DocumentRows k(p.packing.cu_seqlens_k, batch, p.batch, p.total_k, p.seqlen_k);
      q0 = q.begin;
      seqlen_q = q.length;
      uncovered = q.uncovered | k.uncovered;
    }
  }
};

// Fills uncovered rows with zeros: dq of the block's query head, and dk and dv of its kv head.
template <class Config>
__device__ __forceinline__ void fill_uncovered(const DeltaParams& p, const DeltaBlock& at) {
  constexpr int BYTES = Config::ELEMENT_BYTES;
  const int tiles = p.by_tiles.divisor;
  for_uncovered_rows<Config::THREADS>(
      p.packing.cu_seqlens_q, at.batch, p.batch, p.total_q, p.seqlen_q, at.tile, tiles,
      [&](int row) { zero_row<BYTES>(p.dq, at.head_kv, at.head_in_group, row, p.head_dim); });
  const int block = at.tile * p.group + at.head_in_group;
  for_uncovered_rows<Config::THREADS>(p.packing.cu_seqlens_k, at.batch, p.batch, p.total_k,
                                      p.seqlen_k, block, tiles * p.group, [&](int row) {
                                        zero_row<BYTES>(p.dk, at.head_kv, 0, row, p.head_dim);
                                        zero_row<BYTES>(p.dv, at.head_kv, 0, row, p.head_dim_v);
                                      });
}

// Sets BwdParams::dq_turns of the fused kernel, which runs next, to 0. Most calls have fewer
// semaphores than threads.
template <class Config>
__device__ __forceinline__ void clear_semaphores(const DeltaParams& p) {
  const int64_t first = int64_t{fresh_block()} * Config::THREADS + threadIdx.x;
#pragma unroll 1
  for (int64_t i = first; i < p.turns; i += int64_t{gridDim.x} * Config::THREADS) p.dq_turns[i] = 0;
}

template <class Config>
__device__ __forceinline__ void delta_block(const DeltaParams& p) {
  using T = typename Config::T;
  constexpr int LANES = Config::LANES_PER_ROW;
  constexpr int CHUNKS = Config::CHUNKS / LANES;  // 16-byte chunks per thread
  if (p.dq_turns != nullptr) clear_semaphores<Config>(p);
  DeltaBlock at(p);
  if (at.uncovered) {
    fill_uncovered<Config>(p, at);
    at = DeltaBlock(p);  // computed again, to keep no values in registers during fill_uncovered()
  }
  const int row = at.tile * Config::BLOCK_ROWS + threadIdx.x / LANES;
  const int lane = threadIdx.x % LANES;
  if (p.packing.cu_seqlens_q != nullptr && row >= padded_rows(at.seqlen_q)) {
    return;  // whole blocks exit, because BLOCK_ROWS divides the number of padded rows
  }

  // Issues all loads before the first use.
  const auto load = [&](uint4(&chunks)[CHUNKS], const View& view) {
    const int64_t first = at.batch * view.batch + at.head_kv * view.head_kv +
                          at.head_in_group * view.head_group +
                          static_cast<int64_t>(at.q0 + row) * view.row;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int column = (c * LANES + lane) * (16 / Config::ELEMENT_BYTES);
      chunks[c] = row < at.seqlen_q && column < p.head_dim_v
                      ? load_global_16(static_cast<const uint8_t*>(view.data) +
                                       Config::ELEMENT_BYTES * (first + column))
                      : uint4{0, 0, 0, 0};
    }
  };
  uint4 out[CHUNKS], dout[CHUNKS];
  load(out, p.out);
  load(dout, p.dout);
  float lse = -INFINITY, dlse = 0.0f;
  if (lane == 0 && row < at.seqlen_q) {
    const int64_t i = lse_begin(p, at.batch, at.head, at.q0) + row;
    lse = p.lse[i];
    if (p.dlse != nullptr) dlse = p.dlse[i];
  }

  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    sum = add_products<T>(out[c], dout[c], sum);
  }
#pragma unroll
  for (int i = LANES / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);

  if (p.dsinks != nullptr && lane == 0 && row < at.seqlen_q) {
    // dsink = exp(sink - lse) * (0 - delta): a sink has no value vector. A sink of +inf takes all
    // weight.
    const float weight = lse == INFINITY ? 1.0f : expf(p.sinks[at.head] - lse);
    p.dsinks[lse_begin(p, at.batch, at.head, at.q0) + row] =
        lse == -INFINITY ? 0.0f : weight * (dlse - sum);
  }
  if (lane == 0) {
    const int64_t i = statistics_begin(p, at.batch, at.head, at.q0) + row;
    p.lse_log2[i] = lse == -INFINITY ? INFINITY : lse * LOG2_E;
    p.delta[i] = lse == -INFINITY ? 0.0f : (sum - dlse) * DS_SCALE<T>;
  }
}

template <int ROWS>
cudaError_t launch_delta_blocks(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  DeltaParams p = *static_cast<const DeltaParams*>(params);
  int64_t tiles = padded_rows(p.seqlen_q) / ROWS;
  int64_t batch = p.batch;
  if (p.packing.cu_seqlens_q != nullptr) {  // rows may be uncovered
    tiles = std::max<int64_t>(tiles, 1);
    batch = std::max<int64_t>(batch, 1);
  }
  const int64_t num_heads_q = int64_t{p.num_heads_kv} * p.group;
  p.by_tiles = make_divisor(tiles);
  p.by_num_heads_q = make_divisor(num_heads_q);
  p.by_group = make_divisor(p.group);
  return launch_1d(entry, &p, tiles * batch * num_heads_q, stream);
}

template <class Config>
constexpr auto launch_delta = &launch_delta_blocks<Config::BLOCK_ROWS>;

}  // namespace flash_dist

// Folds what several blocks have computed of a task: units of the groups that were cut, then groups.
//
// Grid      x = row of a task, for each share whose end cuts a task that begins in it.
// Block     a thread owns two columns of the row.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/entry.h"
#include "core/fold.cuh"
#include "core/views.cuh"
#include "decode_plans.h"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DecodeFoldConfig
    : Config<DecodeFoldPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<DecodeFoldPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V>;
  using Smem = typename DecodeShares<Base::THREADS>::Smem;
  static constexpr int BLOCK_ROWS = 1;
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(2 * Base::THREADS >= HEAD_DIM);
};

// A partial result of a row, of this thread's two columns.
struct PartialPair {
  float top, sum;
  float2 out;

  __device__ __forceinline__ PartialPair() : top(-INFINITY), sum(0.0f), out{0.0f, 0.0f} {}
  __device__ __forceinline__ PartialPair(const DecodeParams& p, int64_t record, int row,
                                         int column) {
    const int64_t at = record * p.tile_rows + row;
    const float2 stats = p.partial_stats[at];
    top = stats.x;
    sum = stats.y;
    out = *reinterpret_cast<const float2*>(p.partial_out + at * p.columns + column);
  }
  __device__ __forceinline__ void fold(const PartialPair& later) {
    const Fold fold(top, later.top);
    top = fold.top;
    sum = fold(sum, later.sum);
    out.x = fold(out.x, later.out.x);
    out.y = fold(out.y, later.out.y);
  }
};

template <class Config>
__device__ __forceinline__ void decode_fold_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int AHEAD = 8;  // records that are loaded at once
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  const int share = blockIdx.x / p.tile_rows;
  const int row = blockIdx.x - share * p.tile_rows;
  const DecodeShares<Config::THREADS> shares(p, smem);
  if (!shares.splits) return;
  const int64_t share_begin = shares.begin(p, share);
  const int64_t share_end = shares.begin(p, share + 1);
  if (share_begin == share_end || share_end == shares.total) return;
  DecodeCursor at = shares.find(p, smem, share_end);
  const int64_t task_begin = at.task_begin(), task_end = at.task_end();
  if (task_begin == share_end || task_begin < share_begin) return;

  const int column = threadIdx.x * 2;
  const int task_row = at.tile(p) * TASK_ROWS + row;
  if (column >= p.columns || task_row >= p.rows) return;
  at.unit = at.extent.first;
  at.position = task_begin;

  PartialPair task;
  while (at.position < task_end) {
    // Up to AHEAD whole groups, or a group that was cut.
    PartialPair parts[AHEAD];
    int count = 0;
    bool cut = false;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i != count || cut || at.position >= task_end) continue;
      const int64_t begin = at.group_begin(), end = at.group_end();
      const int owner = shares.owner(p, begin);
      if (end <= shares.begin(p, owner + 1)) {
        parts[i] = PartialPair(p, shares.group_record(p, at, owner), row, column);
        ++count;
        at.unit += static_cast<int>(end - begin);
        at.position = end;
      } else {
        cut = true;
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < count) task.fold(parts[i]);
    }
    if (!cut) continue;
    const int64_t first = shares.unit_record(p, at);
    const int units = static_cast<int>(at.group_end() - at.position);
    const int number = at.unit % GROUP_UNITS;
#pragma unroll
    for (int i = 0; i < GROUP_UNITS; ++i) {
      if (i < units) parts[i] = PartialPair(p, first + number + i, row, column);
    }
    PartialPair group;
#pragma unroll
    for (int i = 0; i < GROUP_UNITS; ++i) {
      if (i < units) group.fold(parts[i]);
    }
    task.fold(group);
    at.unit += units;
    at.position += units;
  }

  const int head = at.head(p);
  const int query = divide(task_row, p.by_group);
  const int member = task_row - query * p.group;
  if (threadIdx.x == 0) {
    const int64_t head_q =
        static_cast<int64_t>(at.batch) * p.num_heads_kv * p.group + head * p.group + member;
    p.lse[head_q * p.seqlen_q + query] = finish_lse(task.top, task.sum);
  }
  if (column >= p.head_dim_v) return;
  const float inverse = finish_inverse(task.sum);
  uint16_t* out = head_begin(p.out, at.batch, head, member) + query * p.out.row + column;
  *reinterpret_cast<uint32_t*>(out) =
      pack<Target, T>(finish_out(task.out.x, inverse), finish_out(task.out.y, inverse));
}

template <class Config>
cudaError_t launch_decode_fold(const void* kernel, const void* params, cudaStream_t stream) {
  DecodeParams p = *static_cast<const DecodeParams*>(params);
  p.by_group = make_divisor(p.group);
  p.cache.by_page = make_divisor(p.cache.page);
  return launch_1d<Config>(kernel, &p, int64_t{p.shares} * p.tile_rows, stream);
}

}  // namespace flash_dist

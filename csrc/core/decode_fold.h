// Folds what several blocks have computed of a task: units of the groups that were cut, then groups.
//
// Grid      x = task, or, where there are fewer, share whose end cuts a task that begins in it;
//           y = some rows and columns of the task.
// Block     16 lanes, a team, fold the units of a group, in 64 columns of a row; then a thread folds
//           the groups of one of them. A round is as many groups as there are teams.
#pragma once

#include "core/behind.h"
#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/fold.cuh"
#include "core/views.cuh"
#include "decode_plans.h"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/dependents.cuh"

namespace flash_dist {

constexpr int PIECE_COLUMNS = 64;
constexpr int TEAM = PIECE_COLUMNS / 4;  // lanes

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DecodeFoldConfig
    : Config<DecodeFoldPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<DecodeFoldPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V>;
  static constexpr int TEAMS = Base::THREADS / TEAM;
  static constexpr int BLOCK_ROWS = 1;
  struct Smem {
    float out[TEAMS][PIECE_COLUMNS];  // of the groups of a round
    float2 stats[TEAMS];
    typename DecodeShares<Base::THREADS>::Smem shares;
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
};

// A partial result of a row, of WIDTH columns.
template <int WIDTH>
struct PartialRow {
  float top, sum, out[WIDTH];

  __device__ __forceinline__ PartialRow() : top(-INFINITY), sum(0.0f), out{} {}
  __device__ __forceinline__ void fold(const PartialRow& later) {
    const Fold fold(top, later.top);
    top = fold.top;
    sum = fold(sum, later.sum);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) out[i] = fold(out[i], later.out[i]);
  }
};

// This lane's four columns of a record.
__device__ __forceinline__ PartialRow<4> read_record(const DecodeParams& p, int64_t record, int row,
                                                     int column) {
  const int64_t at = record * p.tile_rows + row;
  const float2 stats = p.partial_stats[at];
  const float4 out = *reinterpret_cast<const float4*>(p.partial_out + at * p.columns + column);
  PartialRow<4> part;
  part.top = stats.x;
  part.sum = stats.y;
  part.out[0] = out.x, part.out[1] = out.y, part.out[2] = out.z, part.out[3] = out.w;
  return part;
}

// The records of a group, of four columns, on their way through registers. Those that do not exist are
// empty.
struct GroupParts {
  PartialRow<4> parts[GROUP_UNITS];

  // Of the group of a cursor: its units, or, where it was not cut, itself.
  template <class Shares>
  __device__ __forceinline__ void read(const DecodeParams& p, const Shares& shares,
                                       const DecodeCursor& at, int row, int column) {
    const int owner = shares.owner(at.position);
    const bool is_cut = shares.is_cut(at, owner);
    const int64_t first = is_cut ? shares.part_record(p, at) + at.unit % GROUP_UNITS
                                 : shares.group_record(p, at, owner);
    const int records = is_cut ? at.group_end() - at.position : 1;
#pragma unroll
    for (int i = 0; i < GROUP_UNITS; ++i) {
      parts[i] = i < records ? read_record(p, first + i, row, column) : PartialRow<4>();
    }
  }
  __device__ __forceinline__ PartialRow<4> fold() const {
    PartialRow<4> group;
#pragma unroll
    for (int i = 0; i < GROUP_UNITS; ++i) group.fold(parts[i]);
    return group;
  }
};

// One column of a row, and by one thread lse.
template <class Config>
__device__ __forceinline__ void store_column(const DecodeParams& p, const DecodeCursor& at,
                                             const PartialRow<1>& all, int row, int column) {
  const int head = at.head(p);
  const int task_row = at.tile(p) * p.task_rows + row;
  if (task_row >= at.extent.rows(p)) return;
  const int query = divide(task_row, p.by_group);
  const int member = task_row - query * p.group;
  const RowEnd end(p, head * p.group + member, all.top, all.sum);
  if (column == 0) {
    p.lse[lse_begin(p, at.batch, head * p.group + member, at.extent.q0) + query] = end.lse;
  }
  if (column >= p.head_dim_v) return;
  const float x = finish_out(all.out[0], end.inverse);
  head_begin(p.out, at.batch, head, member)[(at.extent.q0 + query) * p.out.row + column] =
      static_cast<uint16_t>(pack<typename Config::Target, typename Config::T>(x, 0.0f));
}

// The groups in slots [begin, end), in their order, four at a time, so that exponentials need not wait for
// each other: an empty one changes nothing.
template <class Config>
__device__ __forceinline__ void fold_slots(PartialRow<1>& task, const typename Config::Smem& smem,
                                           int begin, int end, int column) {
  constexpr int AT_ONCE = 4;
#pragma unroll 1
  for (int first = begin; first < end; first += AT_ONCE) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      PartialRow<1> group;
      if (first + i < end) {
        group.top = smem.stats[first + i].x;
        group.sum = smem.stats[first + i].y;
        group.out[0] = smem.out[first + i][column];
      }
      task.fold(group);
    }
  }
}

template <class Config>
__device__ __forceinline__ void decode_fold_block(const DecodeParams& p) {
  constexpr int TEAMS = Config::TEAMS;
  constexpr int QUARTERS = Config::THREADS / PIECE_COLUMNS;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  let_next_start<typename Config::Target>();
  const DecodeShares<Config::THREADS> shares(p, smem.shares);
  const bool by_task = p.batch * p.row_tiles * p.num_heads_kv <= p.shares;
  const int end = by_task ? 0 : shares.begin(blockIdx.x + 1);
  // NOTE: what the kernel before reads was there when it let this one start.
  if (shares.grain == Grain::TASK || (!by_task && end >= shares.total)) {
    return wait_for_previous<typename Config::Target>();  // NOTE: every block waits
  }
  DecodeCursor at =
      by_task ? shares.find_task(p, smem.shares, blockIdx.x) : shares.find(p, smem.shares, end);
  wait_for_previous<typename Config::Target>();
  if (at.task >= at.extent.tasks(p)) return;
  const int task_begin = at.task_begin();
  const int last = shares.grain == Grain::GROUP ? at.last_group() : at.task_end() - 1;
  const bool is_begun = by_task || (shares.begin(blockIdx.x) <= task_begin && task_begin < end);
  if (!is_begun || shares.owner(task_begin) == shares.owner(last)) return;

  const int first_group = at.extent.first / GROUP_UNITS;
  const int groups = (at.extent.end - 1) / GROUP_UNITS + 1 - first_group;
  const int slices = p.columns / PIECE_COLUMNS;
  const int pieces = p.tile_rows * slices;
  const int first_piece = pieces * static_cast<int>(blockIdx.y) / p.fold_parts;
  const int end_piece = pieces * (static_cast<int>(blockIdx.y) + 1) / p.fold_parts;

  // Groups of all pieces one behind the other. Threads take turns by 64 with the pieces. The records of a
  // round are read while the groups of the one before are folded.
  const int items = (end_piece - first_piece) * groups;
  const int quarter = threadIdx.x / PIECE_COLUMNS;
  const int own_column = threadIdx.x % PIECE_COLUMNS;
  const int team = threadIdx.x / TEAM;
  const int team_column = threadIdx.x % TEAM * 4;
  GroupParts parts;
  const auto read = [&](int item) {
    if (item >= items) return;
    const int piece = item / groups;
    const int group = item - piece * groups;
    at.unit = max((first_group + group) * GROUP_UNITS, at.extent.first);
    at.position = task_begin + at.unit - at.extent.first;
    const int row = (first_piece + piece) / slices;
    const int slice = first_piece + piece - row * slices;
    parts.read(p, shares, at, row, slice * PIECE_COLUMNS + team_column);
  };
  PartialRow<1> task;
  read(team);
  for (int first = 0; first < items; first += TEAMS) {
    if (first + team < items) {
      const PartialRow<4> group = parts.fold();
      *reinterpret_cast<float4*>(&smem.out[team][team_column]) = {group.out[0], group.out[1],
                                                                  group.out[2], group.out[3]};
      if (team_column == 0) smem.stats[team] = {group.top, group.sum};
    }
    __syncthreads();
    read(first + TEAMS + team);
    const int last = min(first + TEAMS, items);
    for (int piece = first / groups; piece * groups < last; ++piece) {
      if (piece % QUARTERS != quarter) continue;
      const int begin = max(first - piece * groups, 0);
      const int end_group = min(last - piece * groups, groups);
      if (begin == 0) task = PartialRow<1>();
      const int slots = piece * groups - first;  // where its groups are
      fold_slots<Config>(task, smem, slots + begin, slots + end_group, own_column);
      if (end_group == groups) {
        const int row = (first_piece + piece) / slices;
        const int slice = first_piece + piece - row * slices;
        store_column<Config>(p, at, task, row, slice * PIECE_COLUMNS + own_column);
      }
    }
    __syncthreads();
  }
}

template <class Config>
cudaError_t launch_decode_fold(const void* kernel, const void* params, cudaStream_t stream) {
  DecodeParams p = *static_cast<const DecodeParams*>(params);
  p.by_group = make_divisor(p.group);
  p.by_heads = make_divisor(p.num_heads_kv);
  p.cache.by_page = make_divisor(p.cache.page);
  const int64_t tasks = int64_t{p.batch} * p.row_tiles * p.num_heads_kv;
  const int64_t most = tasks < p.shares ? tasks : p.shares;
  return launch_behind<Config>(kernel, &p, dim3(static_cast<unsigned>(most), p.fold_parts), stream);
}

}  // namespace flash_dist

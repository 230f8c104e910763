// Folds what several blocks have computed of a task of latent keys: parts of the groups that were cut,
// then groups. The order is that of core/decode_fold.h, and so are the bits; there is more of it, as a
// task has up to 64 rows of 512 columns.
//
// Grid      as core/decode_fold.h: x = task, or, where there are fewer, share whose end cuts a task
//           that begins in it; y = some rows and columns of the task.
// Warp      of a row 32 or 128 columns, piece after piece. Of 32 records lane i knows where number i
//           lies and what it and those before it are multiplied by, which the tops alone decide. Then
//           all lanes read records, many at once, and fold their columns, while the tops of the next
//           32 are on their way.
#pragma once

#include "core/config.h"
#include "core/decode_fold.h"
#include "core/decode_work.cuh"
#include "core/fold.cuh"
#include "core/views.cuh"
#include "decode_plans.h"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/dependents.cuh"

namespace flash_dist {

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PART_UNITS_>
struct MlaFoldConfigOf : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr int PART_UNITS = PART_UNITS_;
  static constexpr int WARPS = Plan::WARPS;
  using Shares = DecodeShares<WARPS * 32, PART_UNITS>;
  static constexpr int BLOCK_ROWS = 1;
  struct Smem {
    typename Shares::Smem shares;
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(HEAD_DIM_V % 128 == 0);
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaFoldConfig =
    MlaFoldConfigOf<MlaFoldPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, 1>;
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaFoldSm90Config = MlaFoldConfigOf<MlaFoldSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                          HEAD_DIM, HEAD_DIM_V, LATENT_PART_UNITS>;

// The records of a task by number: of its groups, each in PARTS parts. A group that was not cut has one
// record, in the place of its first part. at: the first unit.
template <int PARTS>
struct TaskRecords {
  static constexpr int PART_UNITS = GROUP_UNITS / PARTS;
  int count;

  __device__ __forceinline__ explicit TaskRecords(const DecodeExtent& extent) {
    const int groups = (extent.end - 1) / GROUP_UNITS + 1 - extent.first / GROUP_UNITS;
    count = groups * PARTS;
  }
  // Where one lies, or -1: there is none.
  template <class Shares>
  __device__ __forceinline__ int place(const DecodeParams& p, const Shares& shares, DecodeCursor at,
                                       int number) const {
    const int group = at.extent.first / GROUP_UNITS + number / PARTS;
    const int begin = max(group * GROUP_UNITS, at.extent.first);
    const int part = group * GROUP_UNITS + number % PARTS * PART_UNITS;
    if (number >= count || part + PART_UNITS <= begin || part >= at.extent.end) return -1;
    const int unit = max(part, begin);
    at.position += unit - at.unit;
    at.unit = unit;
    const int owner = shares.owner(at.group_begin());
    if (PARTS > 1 && shares.is_cut(at, owner)) {
      return static_cast<int>(shares.part_record(p, at)) + number % PARTS;
    }
    return unit == begin ? static_cast<int>(shares.group_record(p, at, owner)) : -1;
  }
};

// The greatest of the lanes before this one, in its LANES.
template <int LANES>
__device__ __forceinline__ float top_before(float top) {
  const int lane = threadIdx.x % LANES;
  float before = __shfl_up_sync(0xffffffffu, top, 1);
  if (lane == 0) before = -INFINITY;
#pragma unroll
  for (int i = 1; i < LANES; i *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, before, i);
    if (lane >= i) before = fmaxf(before, other);
  }
  return before;
}

// How 32 records of a row are folded, this lane's one of them: into its group of PARTS, and that into the
// task.
template <int PARTS>
struct FoldSteps {
  Fold part, group;

  // top: of this lane's record; task_top: the greatest of the 32s before.
  __device__ __forceinline__ FoldSteps(float top, float task_top)
      : part(PARTS > 1 ? top_before<PARTS>(top) : -INFINITY, top),
        group(make_group(greatest_of_group(top), task_top)) {}

  __device__ __forceinline__ static float greatest_of_group(float top) {
#pragma unroll
    for (int i = 1; i < PARTS; i *= 2) {
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
    }
    return top;
  }
  // Groups count at their last record.
  __device__ __forceinline__ static Fold make_group(float top, float task_top) {
    const bool is_last = threadIdx.x % PARTS == PARTS - 1;
    return {fmaxf(task_top, top_before<32>(is_last ? top : -INFINITY)), top};
  }
  __device__ __forceinline__ static Fold of_lane(const Fold& own, int lane) {
    Fold fold = own;
    fold.keep = __shfl_sync(0xffffffffu, own.keep, lane);
    fold.add = __shfl_sync(0xffffffffu, own.add, lane);
    return fold;
  }
};

// A row's sum and WIDTH columns of its out, of a task or group.
template <int WIDTH>
struct FoldedColumns {
  float sum = 0.0f, out[WIDTH] = {};

  __device__ __forceinline__ void fold(const FoldedColumns& later, const Fold& fold) {
    sum = fold(sum, later.sum);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) out[i] = fold(out[i], later.out[i]);
  }
  __device__ __forceinline__ void read(const float* from) {
    if constexpr (WIDTH == 4) {
      const float4 x = *reinterpret_cast<const float4*>(from);
      out[0] = x.x, out[1] = x.y, out[2] = x.z, out[3] = x.w;
    } else {
      out[0] = *from;
    }
  }
};

template <class Config, int WIDTH>
__device__ __forceinline__ void store_columns(const DecodeParams& p, const DecodeCursor& at,
                                              const FoldedColumns<WIDTH>& all, float top, int row,
                                              int column) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  const int head = at.head(p);
  const int task_row = at.tile(p) * p.task_rows + row;
  if (task_row >= at.extent.rows(p)) return;
  const int query = divide(task_row, p.by_group);
  const int member = task_row - query * p.group;
  const RowEnd end(p, head * p.group + member, top, all.sum);
  if (column == 0) {
    p.lse[lse_begin(p, at.batch, head * p.group + member, at.extent.q0) + query] = end.lse;
  }
  if (column >= p.head_dim_v) return;
  uint16_t* out =
      head_begin(p.out, at.batch, head, member) + (at.extent.q0 + query) * p.out.row + column;
  if constexpr (WIDTH == 1) {
    *out = static_cast<uint16_t>(pack<Target, T>(finish_out(all.out[0], end.inverse), 0.0f));
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {
      *reinterpret_cast<uint32_t*>(out + i) = pack<Target, T>(
          finish_out(all.out[i], end.inverse), finish_out(all.out[i + 1], end.inverse));
    }
  }
}

// Top and sum of a row of a record; -1: there is none.
__device__ __forceinline__ float2 read_stats(const DecodeParams& p, int record, int row) {
  if (record < 0) return {-INFINITY, 0.0f};
  return p.partial_stats[int64_t{record} * p.tile_rows + row];
}

// 32 * WIDTH columns of a row, by a warp. record: of the first 32 that of this lane, the same for all rows.
template <class Config, int PARTS, int WIDTH>
__device__ __forceinline__ void fold_piece(const DecodeParams& p,
                                           const typename Config::Shares& shares,
                                           const DecodeCursor& at, int record, int row,
                                           int first_column) {
  constexpr bool HAS_ROOM = Config::Target::NUMBER < 100;  // measured: 8 bytes spilled on 10.0
  constexpr int AT_ONCE = WIDTH == 1 && !HAS_ROOM ? 16 : 32 / WIDTH;
  const int lane = threadIdx.x % 32;
  const int column = first_column + lane * WIDTH;
  const float* out = p.partial_out + column;
  const TaskRecords<PARTS> records(at.extent);
  FoldedColumns<WIDTH> task;
  float top = -INFINITY;
  float2 stats = read_stats(p, record, row);
#pragma unroll 1
  for (int first = 0; first < records.count; first += 32) {
    // NOTE: rows of all records are fewer than 2^31, as each takes 2 KB.
    const int place = record < 0 ? -1 : record * p.tile_rows + row;
    const FoldSteps<PARTS> steps(stats.x, top);
    const float own_sum = stats.y;
    if (first + 32 < records.count) {
      record = records.place(p, shares, at, first + 32 + lane);
      stats = read_stats(p, record, row);
    }
#pragma unroll 1
    for (int i = 0; i < 32 && first + i < records.count; i += AT_ONCE) {
      FoldedColumns<WIDTH> parts[AT_ONCE], group;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int from = __shfl_sync(0xffffffffu, place, i + j);
        if (from >= 0) parts[j].read(out + int64_t{from} * Config::HEAD_DIM_V);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        parts[j].sum = __shfl_sync(0xffffffffu, own_sum, i + j);
        if constexpr (PARTS == 1) {
          task.fold(parts[j], steps.of_lane(steps.group, i + j));
        } else {
          group.fold(parts[j], steps.of_lane(steps.part, i + j));
          if (j % PARTS != PARTS - 1) continue;
          task.fold(group, steps.of_lane(steps.group, i + j));
          group = FoldedColumns<WIDTH>();
        }
      }
    }
    top = __shfl_sync(0xffffffffu, steps.group.top, 31);
  }
  store_columns<Config>(p, at, task, top, row, column);
}

// All pieces of this block, which blocks take in turns. Few are cut smaller, so that more warps have one.
template <class Config, int PARTS>
__device__ __forceinline__ void fold_pieces(const DecodeParams& p,
                                            const typename Config::Shares& shares,
                                            const DecodeCursor& at) {
  const int warps = p.fold_parts * Config::WARPS;
  const int warp = static_cast<int>(threadIdx.x) / 32 * p.fold_parts + static_cast<int>(blockIdx.y);
  constexpr int WIDE = Config::HEAD_DIM_V / 128, NARROW = 4 * WIDE;  // pieces of a row
  const int record = TaskRecords<PARTS>(at.extent).place(p, shares, at, threadIdx.x % 32);
  if (p.tile_rows * WIDE >= warps) {
    for (int i = warp; i < p.tile_rows * WIDE; i += warps) {
      fold_piece<Config, PARTS, 4>(p, shares, at, record, i / WIDE, i % WIDE * 128);
    }
  } else {
    for (int i = warp; i < p.tile_rows * NARROW; i += warps) {
      fold_piece<Config, PARTS, 1>(p, shares, at, record, i / NARROW, i % NARROW * 32);
    }
  }
}

template <class Config>
__device__ __forceinline__ void mla_fold_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  let_next_start<Target>();
  const typename Config::Shares shares(p, smem.shares);
  const bool by_task = p.batch * p.row_tiles * p.num_heads_kv <= p.shares;
  const int end = by_task ? 0 : shares.begin(blockIdx.x + 1);
  // NOTE: what the kernel before reads was there when it let this one start.
  if (shares.grain == Grain::TASK || (!by_task && end >= shares.total)) {
    return wait_for_previous<Target>();  // NOTE: every block waits
  }
  DecodeCursor at =
      by_task ? shares.find_task(p, smem.shares, blockIdx.x) : shares.find(p, smem.shares, end);
  wait_for_previous<Target>();
  if (at.task >= at.extent.tasks(p)) return;
  const int task_begin = at.task_begin();
  const int last = shares.grain == Grain::GROUP
                       ? at.last_group()
                       : at.last_part<Config::PART_UNITS>(at.extent.first, at.extent.end);
  const bool is_begun = by_task || (shares.begin(blockIdx.x) <= task_begin && task_begin < end);
  if (!is_begun || shares.owner(task_begin) == shares.owner(last)) return;

  at.position = task_begin;
  at.unit = at.extent.first;
  if (shares.grain == Grain::PART) {
    fold_pieces<Config, Config::Shares::PARTS>(p, shares, at);
  } else {
    fold_pieces<Config, 1>(p, shares, at);
  }
}

// Tasks of 16 rows may leave units, which this kernel does not know.
template <class Config>
const char* refuse_mla_fold_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  return p.task_rows < 64 ? "units of 16 rows are folded by the other kernel" : nullptr;
}

}  // namespace flash_dist

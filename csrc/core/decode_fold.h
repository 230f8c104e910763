// Folds what several blocks have computed of a task: parts of the groups that were cut, then groups.
//
// Grid      x = task, or, where there are fewer, share whose end cuts a task that begins in it;
//           y = some rows and columns of the task.
// Warp      of a row 32, 64 or 128 columns. Lanes are groups: each knows where the records of its
//           own lie, and what these are multiplied by, which the tops alone decide. Then lanes are
//           columns: records of all these groups, one behind the other, are read many at once and
//           folded. Tops and the first records are on their way together.
// Block     where there are more blocks than pieces, its warps share the groups of one: each folds
//           some, in shared memory, and one warp folds these.
#pragma once

#include "core/behind.h"
#include "core/config.h"
#include "core/decode_launch.h"
#include "core/decode_work.cuh"
#include "core/fold.cuh"
#include "core/views.cuh"
#include "decode_plans.h"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/dependents.cuh"

namespace flash_dist {

// Where a group lies: in one record, or in its parts, one behind the other. 0 parts: there is none.
struct GroupRecords {
  int first = 0, parts = 0;

  GroupRecords() = default;
  // at: the first unit of the task, whose groups are counted from 0.
  template <class Shares>
  __device__ __forceinline__ GroupRecords(const DecodeParams& p, const Shares& shares,
                                          DecodeCursor at, int number) {
    constexpr int PART_UNITS = GROUP_UNITS / Shares::PARTS;
    const int begin = (at.extent.first / GROUP_UNITS + number) * GROUP_UNITS;
    if (begin >= at.extent.end) return;
    const int unit = max(begin, at.extent.first);
    at.position += unit - at.unit;
    at.unit = unit;
    const int owner = shares.owner(at.position);
    if (!shares.is_cut(at, owner)) {
      first = static_cast<int>(shares.group_record(p, at, owner));
      parts = 1;
      return;
    }
    const int last = min(begin + GROUP_UNITS, at.extent.end) - 1;
    first = static_cast<int>(shares.part_record(p, at)) + unit % GROUP_UNITS / PART_UNITS;
    parts = last / PART_UNITS - unit / PART_UNITS + 1;
  }
};

__device__ __forceinline__ int count_groups(const DecodeExtent& extent) {
  return (extent.end - 1) / GROUP_UNITS + 1 - extent.first / GROUP_UNITS;
}

// Records that a warp folds one after the other, those of each lane's group together.
struct FoldSlots {
  static constexpr int COUNT = 64;
  // Of the record's row, in pieces of 32 columns. Before: among all rows, ~ of the last of its group.
  int places[COUNT];
  // keep and add, core/fold.cuh, of the record in its group. Before: its top and sum.
  float2 factors[COUNT];

  // first: the slot of the first of this lane's.
  __device__ __forceinline__ void place(const GroupRecords& own, int first, int rows, int row) {
#pragma unroll 1
    for (int i = 0; i < own.parts; ++i) {
      // NOTE: rows of all records are fewer than 2^31, and pieces, as each takes 128 bytes.
      const int at = (own.first + i) * rows + row;
      places[first + i] = i + 1 == own.parts ? ~at : at;
    }
  }
  // A lane has every 32nd; what slots that are left over read is some record, and goes nowhere. Which ones
  // are the last of their groups is returned, a bit for each.
  __device__ __forceinline__ uint64_t read(float2 (&stats)[COUNT / 32], const DecodeParams& p,
                                           int records) {
    const int lane = threadIdx.x % 32;
    uint64_t lasts = 0;
    int at[COUNT / 32];
#pragma unroll
    for (int i = 0; i < COUNT / 32; ++i) {
      const bool exists = i * 32 + lane < records;
      at[i] = places[exists ? i * 32 + lane : 0];
      lasts |= uint64_t{__ballot_sync(0xffffffffu, exists && at[i] < 0)} << (32 * i);
    }
    __syncwarp();  // all have read
#pragma unroll
    for (int i = 0; i < COUNT / 32; ++i) {
      at[i] = max(at[i], ~at[i]);
      stats[i] = p.partial_stats[at[i]];
      places[i * 32 + lane] = at[i] * (p.columns / 32);
    }
    __syncwarp();
    return lasts;
  }
  __device__ __forceinline__ void write(const float2 (&stats)[COUNT / 32]) {
#pragma unroll
    for (int i = 0; i < COUNT / 32; ++i) factors[i * 32 + threadIdx.x % 32] = stats[i];
  }
  // How this lane's records are folded; top and sum of all.
  template <int PARTS>
  __device__ __forceinline__ float2 fold_stats(const GroupRecords& own, int first) {
    constexpr int AT_ONCE = PARTS < 4 ? PARTS : 4;  // exponentials that do not wait for each other
    float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < own.parts; begin += AT_ONCE) {
#pragma unroll
      for (int i = begin; i < begin + AT_ONCE; ++i) {
        if (i >= own.parts) break;
        const float2 stats = factors[first + i];
        const Fold fold(top, stats.x);
        top = fold.top;
        sum = fold(sum, stats.y);
        factors[first + i] = {fold.keep, fold.add};
      }
    }
    return {top, sum};
  }
};

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PART_UNITS>
struct DecodeFoldConfigOf : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr int WARPS = Plan::WARPS;
  using Shares = DecodeShares<WARPS * 32, PART_UNITS>;
  static constexpr int BLOCK_ROWS = 1;
  // NOTE: little shared memory, so that blocks come while those of the kernel before are still there.
  static constexpr int WARP_GROUPS = 8;  // of a warp, where warps share them
  static_assert(WARP_GROUPS * Shares::PARTS <= FoldSlots::COUNT);
  struct Together {
    float out[WARPS * WARP_GROUPS][32];
    float2 stats[WARPS * WARP_GROUPS];  // top and sum
    float4 steps[32];
  };
  struct Smem {
    FoldSlots slots[WARPS];
    union {
      float4 steps[WARPS][FoldSlots::COUNT];  // keep, add and sum of groups, at their last records
      Together together;
    };
    typename Shares::Smem counts;
    Shares shares;               // here, as registers are few, likewise
    DecodeCursor at;             // the first unit of the task
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DecodeFoldConfig = DecodeFoldConfigOf<DecodeFoldPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                            HEAD_DIM, HEAD_DIM_V, 1>;
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaFoldConfig =
    DecodeFoldConfigOf<MlaFoldPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, 1>;
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaFoldSm90Config = DecodeFoldConfigOf<MlaFoldSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                             HEAD_DIM, HEAD_DIM_V, LATENT_PART_UNITS>;

// The sum of this lane's number and those of the lanes before.
__device__ __forceinline__ int sum_until(int number) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, number, i);
    if (lane >= i) number += other;
  }
  return number;
}

// The greatest of the lanes before this one.
__device__ __forceinline__ float top_before(float top) {
  const int lane = threadIdx.x % 32;
  float before = __shfl_up_sync(0xffffffffu, top, 1);
  if (lane == 0) before = -INFINITY;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, before, i);
    if (lane >= i) before = fmaxf(before, other);
  }
  return before;
}

// WIDTH columns of a row.
template <int WIDTH>
struct Columns {
  float x[WIDTH] = {};

  __device__ __forceinline__ void fold(const Columns& later, float keep, float add) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x[i] = fold_in(x[i], later.x[i], keep, add);
  }
  __device__ __forceinline__ void read(const float* from) {
    if constexpr (WIDTH == 4) {
      const float4 all = *reinterpret_cast<const float4*>(from);
      x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
    } else if constexpr (WIDTH == 2) {
      const float2 all = *reinterpret_cast<const float2*>(from);
      x[0] = all.x, x[1] = all.y;
    } else {
      x[0] = *from;
    }
  }
};

// A task so far, or all of it: a row's top and sum, and this lane's columns.
template <int WIDTH>
struct FoldedTask {
  float top = -INFINITY, sum = 0.0f;
  Columns<WIDTH> out;

  // What this lane's group, behind those of the lanes before, is multiplied by; with its sum, for fold().
  __device__ __forceinline__ float4 next_steps(float group_top, float group_sum) {
    const Fold fold(fmaxf(top, top_before(group_top)), group_top);
    top = __shfl_sync(0xffffffffu, fold.top, 31);
    return {fold.keep, fold.add, group_sum, 0.0f};
  }
  __device__ __forceinline__ void fold(const Columns<WIDTH>& group, const float4& steps) {
    sum = fold_in(sum, steps.z, steps.x, steps.y);
    out.fold(group, steps.x, steps.y);
  }
  // Those for which ends has a bit.
  template <int COUNT>
  __device__ __forceinline__ void fold(const Columns<WIDTH> (&groups)[COUNT], const float4* steps,
                                       unsigned ends) {
    constexpr int AT_ONCE = COUNT < 8 ? COUNT : 8;
#pragma unroll
    for (int first = 0; first < COUNT; first += AT_ONCE) {
      float4 own[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) own[i] = steps[first + i];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (ends >> (first + i) & 1) fold(groups[first + i], own[i]);
      }
    }
  }
};

// Groups of a warp's lanes, as many as slots have room for: that many are returned. columns: of this
// lane, of row 0 of record 0. know(top, sum, slot) is told what a row of the lane's group has, and the slot
// of its last record, -1 without, while records are on their way; take(number, slot, ends, columns) gets
// the columns of some slots from one on: groups from a number on, where ends has a bit.
template <class Config, int WIDTH, class Know, class Take>
__device__ __forceinline__ int fold_groups(const DecodeParams& p, FoldSlots& slots,
                                           GroupRecords own, int row, const float* columns,
                                           const Know& know, const Take& take) {
  constexpr int AT_ONCE = 16 / WIDTH;    // as many as there are registers for
  const int end = sum_until(own.parts);  // of the lane's records among those of all
  const int groups = __popc(__ballot_sync(0xffffffffu, end <= FoldSlots::COUNT));
  const int records = __shfl_sync(0xffffffffu, end, groups - 1);
  if (records == 0) return groups;
  if (end > FoldSlots::COUNT) own.parts = 0;
  __syncwarp();  // all are done with the slots, and with what know() left
  slots.place(own, end - own.parts, p.tile_rows, row);
  __syncwarp();
  float2 stats[FoldSlots::COUNT / 32];
  const uint64_t lasts = slots.read(stats, p, records);
  Columns<WIDTH> group;
  int number = 0;
#pragma unroll 1
  for (int first = 0; first < records; first += AT_ONCE) {
    Columns<WIDTH> parts[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      parts[j].read(columns + int64_t{slots.places[first + j]} * 32);
    }
    if (first == 0) {
      slots.write(stats);
      __syncwarp();
      const float2 all = slots.fold_stats<Config::Shares::PARTS>(own, end - own.parts);
      know(all.x, all.y, own.parts > 0 ? end - 1 : -1);
      __syncwarp();
    }
    const auto ends = static_cast<unsigned>(lasts >> first);
    float2 factors[AT_ONCE];  // all of them first: one read would wait for the other
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) factors[j] = slots.factors[first + j];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      group.fold(parts[j], factors[j].x, factors[j].y);
      parts[j] = group;
      if (ends >> j & 1) group = Columns<WIDTH>();
    }
    take(number, first, ends, parts);
    number += __popc(ends & ((1u << AT_ONCE) - 1));
  }
  return groups;
}

template <class Config, int WIDTH>
__device__ __forceinline__ void store_columns(const DecodeParams& p, const DecodeCursor& at,
                                              const FoldedTask<WIDTH>& all, int row, int column) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  const int head = at.head;
  const int task_row = at.row0(p) + row;
  if (task_row >= at.extent.rows(p)) return;
  const int query = divide(task_row, p.by_group);
  const int member = task_row - query * p.group;
  const RowEnd end(p, head * p.group + member, all.top, all.sum);
  if (column == 0) {
    p.lse[lse_begin(p, at.batch, head * p.group + member, at.extent.q0) + query] = end.lse;
  }
  if (column >= p.head_dim_v) return;
  uint16_t* out =
      head_begin(p.out, at.batch, head, member) + (at.extent.q0 + query) * p.out.row + column;
  const auto& x = all.out.x;
  if constexpr (WIDTH == 1) {
    *out = static_cast<uint16_t>(pack<Target, T>(finish_out(x[0], end.inverse), 0.0f));
  } else {
#pragma unroll
    for (int i = 0; i < WIDTH; i += 2) {
      *reinterpret_cast<uint32_t*>(out + i) =
          pack<Target, T>(finish_out(x[i], end.inverse), finish_out(x[i + 1], end.inverse));
    }
  }
}

// 32 * WIDTH columns of a row, by a warp. own: the group of this lane among the first 32.
template <class Config, int WIDTH>
__device__ __forceinline__ void fold_alone(const DecodeParams& p, typename Config::Smem& smem,
                                           GroupRecords own, int piece) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slices = p.columns / (32 * WIDTH);
  const int row = piece / slices;
  const int column = ((piece - row * slices) * 32 + lane) * WIDTH;
  const int groups = count_groups(smem.at.extent);
  float4(&steps)[FoldSlots::COUNT] = smem.steps[warp];
  FoldedTask<WIDTH> task;
#pragma unroll 1
  for (int first = 0; first < groups;) {
    if (first > 0) own = GroupRecords(p, smem.shares, smem.at, first + lane);
    first += fold_groups<Config, WIDTH>(
        p, smem.slots[warp], own, row, p.partial_out + column,
        [&](float top, float sum, int slot) {
          const float4 own_steps = task.next_steps(top, sum);
          if (slot >= 0) steps[slot] = own_steps;
        },
        [&](int, int slot, unsigned ends, const auto& out) { task.fold(out, steps + slot, ends); });
  }
  store_columns<Config>(p, smem.at, task, row, column);
}

// What the warps of a block have of groups, in their order, by one warp.
template <class Together>
__device__ __forceinline__ void fold_shared(FoldedTask<1>& task, Together& shared, int groups) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < groups; first += 32) {
    const float2 stats =
        first + lane < groups ? shared.stats[first + lane] : float2{-INFINITY, 0.0f};
    __syncwarp();  // all are done with the steps
    shared.steps[lane] = task.next_steps(stats.x, stats.y);
    __syncwarp();
    const int count = min(groups - first, 32);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      task.fold(Columns<1>{shared.out[first + i][lane]}, shared.steps[i]);
    }
  }
}

// Groups of a warp where the block has them together.
template <class Config>
__device__ __forceinline__ int groups_of_warp(const DecodeExtent& extent) {
  return min((count_groups(extent) + Config::WARPS - 1) / Config::WARPS, Config::WARP_GROUPS);
}

// 32 columns of a row, by a block. own: the group of this lane among the first.
template <class Config>
__device__ __forceinline__ void fold_together(const DecodeParams& p, typename Config::Smem& smem,
                                              GroupRecords own, int piece) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slices = p.columns / 32;
  const int row = piece / slices;
  const int column = (piece - row * slices) * 32 + lane;
  const int groups = count_groups(smem.at.extent);
  const int each = groups_of_warp<Config>(smem.at.extent);
  auto& shared = smem.together;
  FoldedTask<1> task;
#pragma unroll 1
  for (int first = 0; first < groups; first += Config::WARPS * each) {
    const int own_first = warp * each;  // of those in shared memory
    if (first > 0) {
      own = lane < each ? GroupRecords(p, smem.shares, smem.at, first + own_first + lane)
                        : GroupRecords();
      __syncthreads();  // the groups before are folded
    }
    fold_groups<Config, 1>(
        p, smem.slots[warp], own, row, p.partial_out + column,
        [&](float top, float sum, int) {
          if (lane < each) shared.stats[own_first + lane] = {top, sum};
        },
        [&](int group, int, unsigned ends, const auto& out) {
          float (*to)[32] = shared.out + own_first + group;
#pragma unroll
          for (const auto& one : out) {
            if (ends & 1) (*to++)[lane] = one.x[0];
            ends >>= 1;
          }
        });
    __syncthreads();
    if (warp == 0) fold_shared(task, shared, min(groups - first, Config::WARPS * each));
  }
  if (warp == 0) store_columns<Config>(p, smem.at, task, row, column);
}

// Warps take pieces in turns, as narrow ones as that all have one; where a block could have each, it has.
template <class Config>
__device__ __forceinline__ void fold_pieces(const DecodeParams& p, typename Config::Smem& smem) {
  using Target = typename Config::Target;
  const int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
  const int blocks = p.fold_parts, block = blockIdx.y;
  const int pieces = p.tile_rows * (p.columns / 32);
  if (pieces <= blocks) {
    const int each = groups_of_warp<Config>(smem.at.extent);
    const GroupRecords own = lane < each
                                 ? GroupRecords(p, smem.shares, smem.at, own_warp * each + lane)
                                 : GroupRecords();
    wait_for_previous<Target>();
    if (block < pieces) fold_together<Config>(p, smem, own, block);
    return;
  }
  const GroupRecords own(p, smem.shares, smem.at, lane);
  wait_for_previous<Target>();
  const int warps = blocks * Config::WARPS, warp = own_warp * blocks + block;
  if (pieces <= warps) {
    if (warp < pieces) fold_alone<Config, 1>(p, smem, own, warp);
  } else if (pieces <= 2 * warps || p.columns < 128) {
#pragma unroll 1
    for (int i = warp; i < pieces / 2; i += warps) fold_alone<Config, 2>(p, smem, own, i);
  } else {
#pragma unroll 1
    for (int i = warp; i < pieces / 4; i += warps) fold_alone<Config, 4>(p, smem, own, i);
  }
}

template <class Config>
__device__ __forceinline__ void decode_fold_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  constexpr int PART_UNITS = GROUP_UNITS / Config::Shares::PARTS;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  // NOTE: what the kernel before reads was there when it started. Every block waits for what it writes, also
  // one that reads nothing, so that the next kernel waits for both.
  const typename Config::Shares shares(p, smem.counts);
  const bool by_task = p.batch * p.row_tiles * p.num_heads_kv <= p.shares;
  const int end = by_task ? 0 : shares.begin(blockIdx.x + 1);
  if (shares.grain == Grain::TASK || (!by_task && end >= shares.total)) {
    return wait_for_previous<Target>();
  }
  DecodeCursor at =
      by_task ? shares.find_task(p, smem.counts, blockIdx.x) : shares.find(p, smem.counts, end);
  if (at.place >= at.extent.tiles) return wait_for_previous<Target>();
  const int task_begin = at.task_begin();
  const int last = shares.grain == Grain::GROUP
                       ? at.last_group()
                       : at.last_part<PART_UNITS>(at.extent.first, at.extent.end);
  const bool is_begun = by_task || (shares.begin(blockIdx.x) <= task_begin && task_begin < end);
  if (!is_begun || shares.owner(task_begin) == shares.owner(last)) {
    return wait_for_previous<Target>();
  }
  at.position = task_begin;
  at.unit = at.extent.first;
  if (threadIdx.x == 0) smem.shares = shares, smem.at = at;
  __syncthreads();
  fold_pieces<Config>(p, smem);
}

// Tasks of 16 rows may leave units, which this kernel does not know.
template <class Config>
const char* refuse_mla_fold_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  return p.task_rows < 64 ? "units of 16 rows are folded by the other kernel" : nullptr;
}

template <class Config>
cudaError_t launch_decode_fold(const void* kernel, const void* params, cudaStream_t stream) {
  const DecodeParams p = with_divisors(*static_cast<const DecodeParams*>(params));
  const int64_t tasks = int64_t{p.batch} * p.row_tiles * p.num_heads_kv;
  const int64_t most = tasks < p.shares ? tasks : p.shares;
  return launch_behind<Config>(kernel, &p, dim3(static_cast<unsigned>(most), p.fold_parts), stream);
}

}  // namespace flash_dist

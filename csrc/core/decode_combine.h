// Combines the partials of work tiles that several splits share: first the key blocks of shared
// groups, then the groups.
//
// Grid      x = work tile. If there are fewer splits than work tiles, x = split: a block combines
//           the shared work tile that begins in its split.
//           y = some rows and columns of the work tile.
// Warp      32, 64 or 128 columns of a row. First each lane handles one group: it finds the group's
//           partials and computes their factors from their tops. Then each lane handles some
//           columns: it reads many partials at once and combines them. Tops and the first partials
//           are loaded together.
// Block     If there is a block for each 32 columns of a row, the warps of a block share the groups
//           of these columns: each warp combines some groups into shared memory, and one warp
//           combines these results.
#pragma once

#include "core/combine.cuh"
#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/sequence.cuh"
#include "decode_plans.h"
#include "native/entry.h"
#include "plans.h"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"

namespace flash_dist {

// Launches blocks of Config's size, which may start before the previous kernel ends (programmatic
// dependent launch, ptx/barrier.cuh). The kernel must call wait_for_previous() before it reads what
// other kernels wrote. NOTE: use this launch only for a kernel with little shared memory. A
// multiprocessor chooses its shared-memory size while it is idle. If a kernel that needs most of
// the shared memory starts while blocks of a kernel that needs little still run, it may get one
// block per multiprocessor instead of three.
template <class Config>
cudaError_t launch_behind(const KernelEntry& entry, const void* params, dim3 blocks,
                          cudaStream_t stream) {
  if (Config::Target::NUMBER < 90) return launch_plain(entry, params, blocks, stream);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  return launch_with(early, entry, params, blocks, stream);
}

// The partials of a group, adjacent in the workspace: one for the whole group, or one per
// SOFTMAX_BLOCKS key blocks if splits share the group. count is 0 if the group does not exist.
struct GroupPartials {
  int first = 0, count = 0;

  GroupPartials() = default;
  // Finds the partials of group `number` of a work tile. at: the cursor at the tile's first key
  // block.
  template <class Splits>
  __device__ __forceinline__ GroupPartials(const DecodeParams& p, const Splits& splits,
                                           DecodeCursor at, int number) {
    constexpr int GROUP = Splits::GROUP, SOFTMAX_BLOCKS = Splits::OF_SOFTMAX;
    const int begin = (at.extent.first / GROUP + number) * GROUP;
    if (begin >= at.extent.end) return;
    const int key_block = max(begin, at.extent.first);
    at.position += key_block - at.key_block;
    at.key_block = key_block;
    const int owner = splits.owner(at.position);
    if (!splits.is_cut(at, owner)) {
      first = static_cast<int>(splits.group_partial(p, at, owner));
      count = 1;
      return;
    }
    const int last = min(begin + GROUP, at.extent.end) - 1;
    first = static_cast<int>(splits.key_block_partial(p, at)) + key_block % GROUP / SOFTMAX_BLOCKS;
    count = last / SOFTMAX_BLOCKS - key_block / SOFTMAX_BLOCKS + 1;
  }
};

// The partials that a warp combines one after the other. The partials of each lane's group are
// adjacent.
struct CombineSlots {
  static constexpr int COUNT = 64;
  // Offset of a partial's row in partial_out, in units of 32 columns. Before read(): the index of
  // this row among all rows of all partials, or the complement (~) of this index for the last
  // partial of a group.
  int places[COUNT];
  // The factors keep and add (core/combine.cuh) with which a partial is combined into its group.
  // Before combine_stats(): the partial's top and sum.
  float2 factors[COUNT];

  // Fills in `places` for the partials of this lane's group. first: the slot of the first partial.
  __device__ __forceinline__ void place(const GroupPartials& own, int first, int rows, int row) {
#pragma unroll 1
    for (int i = 0; i < own.count; ++i) {
      // NOTE: 32 bits are enough for this index, and for an offset in units of 32 columns: a unit
      // is 128 bytes, so 2^31 units are 256 GiB.
      const int at = (own.first + i) * rows + row;
      places[first + i] = i + 1 == own.count ? ~at : at;
    }
  }
  // Reads top and sum of the partials into registers, and converts `places` to offsets. Each lane
  // reads every 32nd slot. For a slot without a partial it reads the first slot's partial, and the
  // values are not used. Returns a bit per slot, set for the last partial of each group.
  __device__ __forceinline__ uint64_t read(float2 (&stats)[COUNT / 32], const DecodeParams& p,
                                           int partials) {
    const int lane = threadIdx.x % 32;
    uint64_t lasts = 0;
    int at[COUNT / 32];
#pragma unroll
    for (int i = 0; i < COUNT / 32; ++i) {
      const bool exists = i * 32 + lane < partials;
      at[i] = places[exists ? i * 32 + lane : 0];
      lasts |= uint64_t{__ballot_sync(0xffffffffu, exists && at[i] < 0)} << (32 * i);
    }
    __syncwarp();  // all lanes have read their places
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
  // Computes the factors of the partials of this lane's group. Returns top and sum of the group.
  template <int GROUP_PARTIALS>
  __device__ __forceinline__ float2 combine_stats(const GroupPartials& own, int first) {
    // The exponentials of this many partials are computed at once.
    constexpr int AT_ONCE = GROUP_PARTIALS < 4 ? GROUP_PARTIALS : 4;
    float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int begin = 0; begin < own.count; begin += AT_ONCE) {
#pragma unroll
      for (int i = begin; i < begin + AT_ONCE; ++i) {
        if (i >= own.count) break;
        const float2 stats = factors[first + i];
        const Combine combine(top, stats.x);
        top = combine.top;
        sum = combine(sum, stats.y);
        factors[first + i] = {combine.keep, combine.add};
      }
    }
    return {top, sum};
  }
};

// WHOLE_GROUPS: maximum number of groups per warp in combine_by_block() if each group has one
// partial.
template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int SOFTMAX_BLOCKS,
          int WHOLE_GROUPS_ = 8>
struct DecodeCombineConfigOf : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr int WARPS = Plan::WARPS;
  using Splits = DecodeSplits<WARPS * 32, SOFTMAX_BLOCKS>;
  static constexpr int BLOCK_ROWS = 1;
  // NOTE: Smem must stay small, so that blocks start while the previous kernel still runs.
  static constexpr int WARP_GROUPS = 8;  // like WHOLE_GROUPS, if groups may have several partials
  static constexpr int WHOLE_GROUPS = WHOLE_GROUPS_;
  static_assert(WARP_GROUPS * Splits::GROUP_PARTIALS <= CombineSlots::COUNT);
  static_assert(WARP_GROUPS <= WHOLE_GROUPS && WHOLE_GROUPS <= 32);
  struct Together {
    float out[WARPS * WHOLE_GROUPS][32];
    float2 stats[WARPS * WHOLE_GROUPS];  // top and sum
    float4 steps[32];
  };
  struct Smem {
    CombineSlots slots[WARPS];
    union {
      float4 steps[WARPS][CombineSlots::COUNT];  // keep, add and sum of a group, in its last slot
      Together together;
    };
    typename Splits::Smem counts;
    Splits splits;               // in shared memory, like the cursor, to save registers
    DecodeCursor at;             // the first key block of the work tile
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DecodeCombineConfig = DecodeCombineConfigOf<DecodeCombinePlan<HEAD_DIM, HEAD_DIM_V, PLAN>,
                                                  Target, T, HEAD_DIM, HEAD_DIM_V, 1, 16>;
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaCombineConfig = DecodeCombineConfigOf<MlaCombinePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target,
                                               T, HEAD_DIM, HEAD_DIM_V, 1>;
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaCombineSm90Config =
    DecodeCombineConfigOf<MlaCombineSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                          HEAD_DIM_V, LATENT_SOFTMAX_BLOCKS>;

// Returns the largest `top` of the lanes before this one.
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

// The WIDTH columns of a row that a lane combines.
template <int WIDTH>
struct Columns {
  float x[WIDTH] = {};

  __device__ __forceinline__ void combine(const Columns& later, float keep, float add) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x[i] = add_scaled(x[i], later.x[i], keep, add);
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

// A row of a work tile, combined over the groups so far: top, sum and the columns of this lane.
template <int WIDTH>
struct CombinedTile {
  float top = -INFINITY, sum = 0.0f;
  Columns<WIDTH> out;

  // Returns the factors (x: keep, y: add) with which this lane's group is combined after the groups
  // of the lanes before it, and the group's sum (z). Raises top to include the groups of all lanes.
  __device__ __forceinline__ float4 next_steps(float group_top, float group_sum) {
    const Combine combine(fmaxf(top, top_before(group_top)), group_top);
    top = __shfl_sync(0xffffffffu, combine.top, 31);
    return {combine.keep, combine.add, group_sum, 0.0f};
  }
  __device__ __forceinline__ void combine(const Columns<WIDTH>& group, const float4& steps) {
    sum = add_scaled(sum, steps.z, steps.x, steps.y);
    out.combine(group, steps.x, steps.y);
  }
  // Combines the groups whose bit in `ends` is set.
  template <int COUNT>
  __device__ __forceinline__ void combine(const Columns<WIDTH> (&groups)[COUNT],
                                          const float4* steps, unsigned ends) {
    constexpr int AT_ONCE = COUNT < 8 ? COUNT : 8;
#pragma unroll
    for (int first = 0; first < COUNT; first += AT_ONCE) {
      float4 own[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) own[i] = steps[first + i];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (ends >> (first + i) & 1) combine(groups[first + i], own[i]);
      }
    }
  }
};

// Combines the partials of the lanes' groups, for as many groups as fit in the slots, and returns
// the number of these groups. columns: this lane's columns of row 0 of partial 0. While partials
// are loaded, calls know(top, sum, slot): top and sum of the lane's group, and the slot of the
// group's last partial, or -1 if the lane has no group. Then calls take(number, slot, ends,
// columns) with the combined columns of several slots from `slot` on. Columns whose bit in `ends`
// is set are those of a complete group. `number` is the index of the first of these groups.
template <class Config, int WIDTH, class Know, class Take>
__device__ __forceinline__ int combine_groups(const DecodeParams& p, CombineSlots& slots,
                                              GroupPartials own, int row, const float* columns,
                                              const Know& know, const Take& take) {
  constexpr int AT_ONCE = 16 / WIDTH;    // partials read at once; registers are the limit
  const int end = sum_until(own.count);  // slot after this lane's last partial
  const int groups = __popc(__ballot_sync(0xffffffffu, end <= CombineSlots::COUNT));
  const int count = __shfl_sync(0xffffffffu, end, groups - 1);
  if (count == 0) return groups;
  if (end > CombineSlots::COUNT) own.count = 0;
  __syncwarp();  // all lanes have read the slots, and the values that know() stored
  slots.place(own, end - own.count, p.partial_rows, row);
  __syncwarp();
  float2 stats[CombineSlots::COUNT / 32];
  const uint64_t lasts = slots.read(stats, p, count);
  Columns<WIDTH> group;
  int number = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += AT_ONCE) {
    Columns<WIDTH> partials[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      partials[j].read(columns + int64_t{slots.places[first + j]} * 32);
    }
    if (first == 0) {
      slots.write(stats);
      __syncwarp();
      const float2 all = slots.combine_stats<Config::Splits::GROUP_PARTIALS>(own, end - own.count);
      know(all.x, all.y, own.count > 0 ? end - 1 : -1);
      __syncwarp();
    }
    const auto ends = static_cast<unsigned>(lasts >> first);
    float2 factors[AT_ONCE];  // loaded first, so that no load waits for another
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) factors[j] = slots.factors[first + j];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      group.combine(partials[j], factors[j].x, factors[j].y);
      partials[j] = group;
      if (ends >> j & 1) group = Columns<WIDTH>();
    }
    take(number, first, ends, partials);
    number += __popc(ends & ((1u << AT_ONCE) - 1));
  }
  return groups;
}

template <class Config, int WIDTH>
__device__ __forceinline__ void store_columns(const DecodeParams& p, const DecodeCursor& at,
                                              const CombinedTile<WIDTH>& all, int row, int column) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  const int head = at.head;
  const int tile_row = at.row0(p) + row;
  if (tile_row >= at.extent.rows(p)) return;
  const int query = divide(tile_row, p.by_group);
  const int head_in_group = tile_row - query * p.group;
  const RowEnd end(p, head * p.group + head_in_group, all.top, all.sum);
  if (column == 0) {
    p.lse[lse_begin(p, at.batch, head * p.group + head_in_group, at.extent.q0) + query] = end.lse;
  }
  if (column >= p.head_dim_v) return;
  uint16_t* out = head_begin(p.out, at.batch, head, head_in_group) +
                  (at.extent.q0 + query) * p.out.row + column;
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

// Combines 32 * WIDTH columns of a row in one warp. own: this lane's group among the first 32.
template <class Config, int WIDTH>
__device__ __forceinline__ void combine_by_warp(const DecodeParams& p, typename Config::Smem& smem,
                                                GroupPartials own, int piece) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slices = p.columns / (32 * WIDTH);
  const int row = piece / slices;
  const int column = ((piece - row * slices) * 32 + lane) * WIDTH;
  const int groups = count_groups<Config::Splits::GROUP>(smem.at.extent);
  float4(&steps)[CombineSlots::COUNT] = smem.steps[warp];
  CombinedTile<WIDTH> tile;
#pragma unroll 1
  for (int first = 0; first < groups;) {
    if (first > 0) own = GroupPartials(p, smem.splits, smem.at, first + lane);
    first += combine_groups<Config, WIDTH>(
        p, smem.slots[warp], own, row, p.partial_out + column,
        [&](float top, float sum, int slot) {
          const float4 own_steps = tile.next_steps(top, sum);
          if (slot >= 0) steps[slot] = own_steps;
        },
        [&](int, int slot, unsigned ends, const auto& out) {
          tile.combine(out, steps + slot, ends);
        });
  }
  store_columns<Config>(p, smem.at, tile, row, column);
}

// Combines, in order and in one warp, the groups that the warps of a block have stored.
template <class Together>
__device__ __forceinline__ void combine_shared(CombinedTile<1>& tile, Together& shared,
                                               int groups) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < groups; first += 32) {
    const float2 stats =
        first + lane < groups ? shared.stats[first + lane] : float2{-INFINITY, 0.0f};
    __syncwarp();  // all lanes have read the steps
    shared.steps[lane] = tile.next_steps(stats.x, stats.y);
    __syncwarp();
    const int count = min(groups - first, 32);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      tile.combine(Columns<1>{shared.out[first + i][lane]}, shared.steps[i]);
    }
  }
}

// Returns the number of groups that a warp combines per iteration of combine_by_block().
template <class Config>
__device__ __forceinline__ int groups_of_warp(const typename Config::Smem& smem) {
  int most = Config::WARP_GROUPS;
  if constexpr (Config::WHOLE_GROUPS > Config::WARP_GROUPS) {
    if (smem.splits.grain == Grain::GROUP) most = Config::WHOLE_GROUPS;
  }
  const int groups = count_groups<Config::Splits::GROUP>(smem.at.extent);
  return min((groups + Config::WARPS - 1) / Config::WARPS, most);
}

// Combines 32 columns of a row in one block. own: this lane's group in the first iteration.
template <class Config>
__device__ __forceinline__ void combine_by_block(const DecodeParams& p, typename Config::Smem& smem,
                                                 GroupPartials own, int piece) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int slices = p.columns / 32;
  const int row = piece / slices;
  const int column = (piece - row * slices) * 32 + lane;
  const int groups = count_groups<Config::Splits::GROUP>(smem.at.extent);
  const int each = groups_of_warp<Config>(smem);
  auto& shared = smem.together;
  CombinedTile<1> tile;
#pragma unroll 1
  for (int first = 0; first < groups; first += Config::WARPS * each) {
    const int own_first = warp * each;  // index of this warp's first group in shared memory
    if (first > 0) {
      own = lane < each ? GroupPartials(p, smem.splits, smem.at, first + own_first + lane)
                        : GroupPartials();
      __syncthreads();  // warp 0 has combined the previous groups
    }
    combine_groups<Config, 1>(
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
    if (warp == 0) combine_shared(tile, shared, min(groups - first, Config::WARPS * each));
  }
  if (warp == 0) store_columns<Config>(p, smem.at, tile, row, column);
}

// Combines the block's pieces of the work tile. A piece is 32 columns of a row if there is a warp
// for each such piece, otherwise 64 or 128 columns. If there is a block for each 32-column piece,
// all warps of a block combine the same piece.
template <class Config>
__device__ __forceinline__ void combine_pieces(const DecodeParams& p, typename Config::Smem& smem) {
  using Target = typename Config::Target;
  const int lane = threadIdx.x % 32, own_warp = threadIdx.x / 32;
  const int blocks = p.combine_blocks, block = blockIdx.y;
  const int pieces = p.partial_rows * (p.columns / 32);
  if (pieces <= blocks) {
    const int each = groups_of_warp<Config>(smem);
    const GroupPartials own = lane < each
                                  ? GroupPartials(p, smem.splits, smem.at, own_warp * each + lane)
                                  : GroupPartials();
    wait_for_previous<Target>();
    if (block < pieces) combine_by_block<Config>(p, smem, own, block);
    return;
  }
  const GroupPartials own(p, smem.splits, smem.at, lane);
  wait_for_previous<Target>();
  const int warps = blocks * Config::WARPS, warp = own_warp * blocks + block;
  if (pieces <= warps) {
    if (warp < pieces) combine_by_warp<Config, 1>(p, smem, own, warp);
  } else if (pieces <= 2 * warps || p.columns < 128) {
#pragma unroll 1
    for (int i = warp; i < pieces / 2; i += warps) combine_by_warp<Config, 2>(p, smem, own, i);
  } else {
#pragma unroll 1
    for (int i = warp; i < pieces / 4; i += warps) combine_by_warp<Config, 4>(p, smem, own, i);
  }
}

template <class Config>
__device__ __forceinline__ void decode_combine_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  constexpr int SOFTMAX_BLOCKS = Config::Splits::OF_SOFTMAX;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  // NOTE: the inputs of the previous kernel are complete here, but the partials that it writes may
  // not be. Every block waits for the partials, even if it reads none, so that the next kernel
  // waits for both kernels.
  const typename Config::Splits splits(p, smem.counts);
  const bool by_tile = p.batch * p.row_tiles * p.num_heads_kv <= p.splits;
  const int end = by_tile ? 0 : splits.begin(blockIdx.x + 1);
  if (splits.grain == Grain::TILE || (!by_tile && end >= splits.total)) {
    return wait_for_previous<Target>();
  }
  DecodeCursor at =
      by_tile ? splits.find_tile(p, smem.counts, blockIdx.x) : splits.find(p, smem.counts, end);
  if (at.place >= at.extent.tiles) return wait_for_previous<Target>();
  const int tile_begin = at.tile_begin();
  const int last = splits.grain == Grain::GROUP
                       ? at.last_group<Config::Splits::GROUP>()
                       : at.last_partial<SOFTMAX_BLOCKS>(at.extent.first, at.extent.end);
  const bool is_begun = by_tile || (splits.begin(blockIdx.x) <= tile_begin && tile_begin < end);
  if (!is_begun || splits.owner(tile_begin) == splits.owner(last)) {
    return wait_for_previous<Target>();
  }
  at.position = tile_begin;
  at.key_block = at.extent.first;
  if (threadIdx.x == 0) smem.splits = splits, smem.at = at;
  __syncthreads();
  combine_pieces<Config>(p, smem);
}

// Returns why this kernel cannot combine a call's partials; null if it can. The kernel for work
// tiles of 16 rows may have stored a partial per key block, which this kernel does not read.
template <class Config>
const char* refuse_mla_combine_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  return p.block_rows < 64 ? "partials of 16 rows are combined by the other kernel" : nullptr;
}

template <class Config>
cudaError_t launch_decode_combine(const KernelEntry& entry, const void* params,
                                  cudaStream_t stream) {
  const DecodeParams p = with_divisors(*static_cast<const DecodeParams*>(params));
  const int64_t tiles = int64_t{p.batch} * p.row_tiles * p.num_heads_kv;
  const int64_t most = tiles < p.splits ? tiles : p.splits;
  return launch_behind<Config>(entry, &p, dim3(static_cast<unsigned>(most), p.combine_blocks),
                               stream);
}

}  // namespace flash_dist

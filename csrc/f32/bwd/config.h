// Tiles, threads and shared memory of the fp32 backward kernels, and the order in which a dK/dV
// block sums its stages of queries.
#pragma once

#include "core/block_iterators.cuh"
#include "core/config.h"
#include "core/params.h"
#include "plans.h"

namespace flash_dist {

// The work of a dK/dV block, shared by its threads. Query head 0 is the first of the group.
struct F32DkdvWork {
  const float *q, *dout;  // first query of query head 0
  int64_t statistics;     // statistics row of that query
  int batch, head;        // head: index of query head 0 among all query heads
  int group_heads_begin, group_heads_end;
  int seqlen_q, seqlen_k;
  int key0;

  __device__ __forceinline__ Mask mask(const BwdParams& p, int head_in_group) const {
    const Sequence sequence{0, 0, seqlen_q, seqlen_k};
    return Mask(p.mask, MaskPlace(p.mask, sequence, batch, head + head_in_group));
  }
};

// A pipeline item: a stage of queries of one query head, and the mask's code for each key tile of
// the block.
struct F32DkdvItem {
  int row0, head_in_group;
  int code[2];
};

// Iterates over the items: for each query head, its query tiles in ascending order. Used by one
// thread.
template <int BLOCK_M, int BLOCK_N>
struct F32DkdvCursor {
  static constexpr int PER_TILE = MASK_TILE / BLOCK_M;
  int head_in_group, i, end;  // stages [i, end) of this head remain; PER_TILE per query tile
  const int4* entries;

  __device__ __forceinline__ void start(const BwdParams& p, const F32DkdvWork& work) {
    head_in_group = work.group_heads_begin;
    open(p, work);
  }
  __device__ __forceinline__ void next(const BwdParams& p, const F32DkdvWork& work) {
    if (++i < end) return;
    ++head_in_group;
    open(p, work);
  }
  __device__ __forceinline__ bool at_end(const F32DkdvWork& work) const {
    return head_in_group >= work.group_heads_end;
  }

  __device__ __forceinline__ F32DkdvItem item(const BwdParams& p, const F32DkdvWork& work) const {
    F32DkdvItem item;
    item.head_in_group = head_in_group;
    int tile = i / PER_TILE;
    if (entries != nullptr) {
      const int4 entry = entries[i / PER_TILE];
      tile = entry.x;
      item.code[0] = entry.y;
      item.code[1] = entry.z;
    } else {
      const KeyRange range = work.mask(p, head_in_group).range(tile * MASK_TILE, MASK_TILE);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key0 = work.key0 / MASK_TILE * MASK_TILE + half * MASK_TILE;
        const bool visible = key0 < work.seqlen_k && range.touches(key0, MASK_TILE);
        const bool full = range.covers(key0, MASK_TILE);
        item.code[half] = !visible ? TILE_EMPTY : full ? TILE_FULL : TILE_ROWS;
      }
    }
    item.row0 = tile * MASK_TILE + i % PER_TILE * BLOCK_M;
    return item;
  }

  // Number of items of the block.
  __device__ __forceinline__ static int count(const BwdParams& p, const F32DkdvWork& work) {
    int items = 0;
    for (int head_in_group = work.group_heads_begin; head_in_group < work.group_heads_end;
         ++head_in_group) {
      const QueryBlockIterator<BLOCK_N> query_blocks = iterator_of(p, work, head_in_group);
      const int here = max(query_blocks.end - query_blocks.begin, 0) * PER_TILE;
      if (p.mask.head_planes == 0) return here * (work.group_heads_end - work.group_heads_begin);
      items += here;
    }
    return items;
  }

 private:
  __device__ __forceinline__ static QueryBlockIterator<BLOCK_N> iterator_of(const BwdParams& p,
                                                                            const F32DkdvWork& work,
                                                                            int head_in_group) {
    const Sequence sequence{0, 0, work.seqlen_q, work.seqlen_k};
    return {work.mask(p, head_in_group), ds_layout(p, sequence), work.key0};
  }
  // Moves to the first item of this query head, or of the next query head that has items.
  __device__ __forceinline__ void open(const BwdParams& p, const F32DkdvWork& work) {
    for (; head_in_group < work.group_heads_end; ++head_in_group) {
      const QueryBlockIterator<BLOCK_N> query_blocks = iterator_of(p, work, head_in_group);
      i = query_blocks.begin * PER_TILE;
      end = query_blocks.end * PER_TILE;
      entries = query_blocks.entries;
      if (i < end) return;
    }
  }
};

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool DROPS_ = false>
struct F32DkdvTiles : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr bool DROPS = DROPS_;
  using Plan::SPLIT, Plan::WARPS, Plan::BLOCK_M;
  static constexpr int ROWS = 16;  // keys per warp
  static constexpr int BLOCK_N = WARPS / SPLIT * ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_N;
  static constexpr int SLICE = HEAD_DIM / SPLIT;
  static constexpr int UNROLL = SLICE > 64 ? 2 : STEPS_AHEAD<Target>;
  static_assert(HEAD_DIM == HEAD_DIM_V && WARPS % SPLIT == 0 && SLICE % 32 == 0);
  static_assert(MASK_TILE % BLOCK_M == 0);
  static_assert(Plan::STAGES <= 2, "an item is read one barrier after it was written");

  struct Stage {
    alignas(128) float q[BLOCK_M * HEAD_DIM];
    alignas(128) float dout[BLOCK_M * HEAD_DIM];
    alignas(16) float lse_log2[BLOCK_M];
    float delta[BLOCK_M];        // must follow lse_log2
    float normalizers[BLOCK_M];  // must follow delta
  };
  // Item i is stored in items[i % ITEMS]. It is needed from the fetch of item i - 1 until the fetch
  // of item i + 2.
  static constexpr int ITEMS = 4;
  struct Smem {
    alignas(128) float k[BLOCK_N * HEAD_DIM];
    alignas(128) float v[BLOCK_N * HEAD_DIM];
    Stage stage[Plan::STAGES];
    alignas(16) float exchange[SPLIT == 1 ? 4 : WARPS * ROWS * BLOCK_M];
    F32DkdvWork work;
    F32DkdvCursor<BLOCK_M, BLOCK_N> cursor;  // used by thread 0; in shared memory to save registers
    F32DkdvItem items[ITEMS];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32DkdvConfig =
    F32DkdvTiles<F32DkdvPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32DkdvConfig =
    F32DkdvTiles<Ieee32DkdvPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool DROPS_ = false>
struct F32DqRecomputeTiles : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr bool DROPS = DROPS_;
  using Plan::SPLIT, Plan::WARPS, Plan::BLOCK_N;
  static constexpr int ROWS = 16;  // queries per warp
  static constexpr int BLOCK_M = WARPS / SPLIT * ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int SLICE = HEAD_DIM / SPLIT;
  static constexpr int UNROLL = SLICE > 64 ? 2 : STEPS_AHEAD<Target>;
  static_assert(HEAD_DIM == HEAD_DIM_V && WARPS % SPLIT == 0 && SLICE % 32 == 0);

  struct Stage {
    alignas(128) float k[BLOCK_N * HEAD_DIM];
    alignas(128) float v[BLOCK_N * HEAD_DIM];
  };
  struct Smem {
    alignas(128) float q[BLOCK_M * HEAD_DIM];
    alignas(128) float dout[BLOCK_M * HEAD_DIM];
    Stage stage[Plan::STAGES];
    alignas(16) float exchange[SPLIT == 1 ? 4 : WARPS * ROWS * BLOCK_N];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32DqRecomputeConfig = F32DqRecomputeTiles<F32DqRecomputePlan<HEAD_DIM, HEAD_DIM_V, PLAN>,
                                                 Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32DqRecomputeConfig =
    F32DqRecomputeTiles<Ieee32DqRecomputePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

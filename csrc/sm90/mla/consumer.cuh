// Code that the consumer warpgroups of kernel.cuh and pair.cuh share: groups of key blocks, masks,
// and P @ V.
#pragma once

#include "core/decode_rows.cuh"
#include "ptx/registers.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/mla/config.h"
#include "sm90/mla/loader.cuh"
#include "sm90/mla/output.cuh"
#include "sm90/mla/place.cuh"
#include "sm90/mla/rest.cuh"
#include "sm90/mla/weights.cuh"
#include "sm90/rows.cuh"

namespace flash_dist {

// Arrives at an empty barrier. Called by a warp after its last read.
__device__ __forceinline__ void release(const uint64_t& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty));
}

// Begins a block that computes S, and returns the splits.
template <class Config>
__device__ __forceinline__ typename Config::Splits begin_block(const MlaSm90Params& params,
                                                               typename Config::Smem& smem) {
  if (threadIdx.x == 0) {
    prefetch_map(params.k);
    smem.make_barriers();
  }
  let_next_start<typename Config::Target>();
  if (params.p.packing.cu_seqlens_q != nullptr) fill_uncovered<Config>(params.p);
  return {params.p, smem.counting};
}

// One of the consumer warpgroups. Consumer `part` computes S of tile `part` of each key block, and
// part `part` of the columns of O.
template <class Config>
class LatentConsumerBase {
 protected:
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Tile = typename Config::Tile;
  using Smem = typename Config::Smem;
  using Place = WarpgroupPlace<Config>;
  static constexpr int PANEL_STEPS = Tile::COLUMNS / 16;
  static constexpr int OT = Config::COLUMNS / 8;
  using Weights = LatentWeights<Target, T>;
  using Scores = typename Weights::Scores;

  __device__ __forceinline__ LatentConsumerBase(const LatentParams& p, Smem& smem, const Place& own)
      : p_(p), smem_(smem), own_(own) {}

  // Returns the cursor of the key block that is `ahead` key blocks after this one. It is valid once
  // a panel of that key block, one that this consumer releases, has been loaded.
  __device__ __forceinline__ const DecodeCursor& key_block(int ahead = 0) const {
    return smem_.key_blocks[(number_ + ahead) % Config::CURSORS];
  }

  // Begins a group. A panel of its first key block must have been loaded.
  __device__ __forceinline__ void begin_group() {
    const DecodeCursor& at = key_block();
    group_end_ = number_ + at.group_end<Config::Splits::GROUP>() - at.position;
    tile_end_ = at.group_end<Config::Splits::GROUP>() == at.tile_end() ? group_end_ - 1 : -1;
    const int2 common = TileRows(p_, at, own_).common_keys();
    const int begin = __reduce_max_sync(0xffffffffu, common.x);
    const int end = __reduce_min_sync(0xffffffffu, common.y);
    full_begin_ = number_ + (begin + KEY_BLOCK - 1) / KEY_BLOCK - at.key_block;
    full_end_ = number_ + end / KEY_BLOCK - at.key_block;
    part_.clear();
  }

  // Waits for the queries of a work tile at its first key block.
  __device__ __forceinline__ void await_queries(const DecodeCursor& at, bool is_first) {
    if (begins_tile(at, is_first)) {
      mbarrier_wait(shared_address(&smem_.q_full), work_tiles_++ % 2);
    }
  }
  // S += Q @ K.T for a panel of K with descriptor b_k. FIRST: writes S without reading it.
  template <bool FIRST>
  __device__ __forceinline__ static void multiply_panel(Scores& s, uint64_t a_q, uint64_t b_k) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < PANEL_STEPS; ++k) {
      if (FIRST && k == 0) {
        wgmma<T, false, false, true>(s.x[0], a_q, b_k);
      } else {
        wgmma<T, false, false>(s.x[0], a_q + Tile::rows_step(k), b_k + Tile::rows_step(k));
      }
    }
  }
  __device__ __forceinline__ static void await_scores(Scores& s) {
    wgmma_wait<0>();
    hold(s.x[0]);
  }

  // Returns whether all keys of the key block are visible to all rows of the warp.
  __device__ __forceinline__ bool all_visible() const {
    return full_begin_ <= number_ && number_ < full_end_;
  }
  // Returns the first key of tile TILE.
  template <int TILE>
  __device__ __forceinline__ static int first_key(const DecodeCursor& at) {
    return at.key_block * KEY_BLOCK + TILE * Config::BLOCK_N;
  }
  // Returns the rows of tile TILE that hold keys visible to any row of the work tile.
  template <int TILE>
  __device__ __forceinline__ RowSpan rows_that_exist() const {
    const DecodeCursor& at = key_block();
    const int key0 = first_key<TILE>(at);
    return {at.extent.visible_begin - key0, at.extent.visible_end - key0};
  }
  // Returns whether the tile has rows outside rows_that_exist(). Their values must be zeroed: some
  // are not loaded, and memory may hold NaN.
  template <int TILE>
  __device__ __forceinline__ bool lacks_keys() const {
    if (all_visible()) return false;
    const RowSpan rows = rows_that_exist<TILE>();
    return rows.first > 0 || rows.end < Config::BLOCK_N;
  }
  // Sets masked scores of tile TILE to -inf. Returns which rows attend to no other tile.
  template <int TILE>
  __device__ __forceinline__ SeeOneTile mask(Scores& s) const {
    if (all_visible()) return {};
    const DecodeCursor& at = key_block();
    const TileRows rows(p_, at, own_);
    const int begin = first_key<TILE>(at), end = begin + Config::BLOCK_N;
    rows.mask(s, begin);
    return {{begin <= rows.begin[0] && rows.end[0] <= end,
             begin <= rows.begin[1] && rows.end[1] <= end}};
  }
  // Zeroes the tile's values outside rows_that_exist().
  template <int TILE, int PANELS>
  __device__ __forceinline__ void clear_values(uint32_t panels) const {
    clear_rows<Tile, Config::BLOCK_N, PANELS, WARPGROUP>(panels, rows_that_exist<TILE>(),
                                                         static_cast<int>(threadIdx.x) % WARPGROUP);
  }

  __device__ __forceinline__ float scale() const { return p_.scores.scale * LOG2_E; }

  // Sets `sum` to keep * sum + add * tile. tile: the row sums of a tile's P.
  __device__ __forceinline__ static void add_sums(float (&sum)[2], const float (&tile)[2],
                                                  const float (&keep)[2], const float (&add)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = add_scaled(sum[h], tile[h], keep[h], add[h]);
  }

  __device__ __forceinline__ void multiply(uint32_t v, Weights& p) {
    multiply_values<Config>(part_.out, p, v);
  }

  // Combines a group of key blocks with O of the work tile, kept in global memory until the tile is
  // complete. If other splits have key blocks of the tile, stores the group's partial instead.
  __device__ __forceinline__ void finish_group(const DecodeCursor& at) {
    const int2 bounds = smem_.bounds;
    const bool owns_tile = bounds.x <= at.tile_begin() && at.tile_end() <= bounds.y;
    if (!owns_tile) {
      return store_partial(p_, part_,
                           smem_.splits.group_partial(p_, at, split_of_block<Config>(p_)), own_);
    }
    const TileRest<Place, OT> rest(p_, own_);
    if (at.group_begin<Config::Splits::GROUP>() > at.tile_begin()) rest.combine_into(part_);
    if (at.position + 1 < at.tile_end()) return rest.store(part_);
    store_tile(p_, part_, at, own_);
  }

  const LatentParams& p_;
  Smem& smem_;
  const Place own_;
  Partial<OT> part_;
  int number_ = 0;             // index of the current key block in the split
  int group_end_, tile_end_;   // index after the group's last key block; index of the work
                               // tile's last key block, -1 if it is in a later group
  int full_begin_, full_end_;  // key blocks [begin, end) that are visible to all rows of the warp
  int work_tiles_ = 0;         // number of work tiles whose queries have arrived
};

}  // namespace flash_dist

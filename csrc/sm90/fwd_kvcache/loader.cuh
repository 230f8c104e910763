// The loading warp of the Hopper forward that is bit-identical to decoding. Its first lane chooses
// work tiles, finds their keys, passes them to the consumers and copies Q. Each lane finds one box
// of each key block, and copies the box's keys and values.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/fwd_kvcache/config.h"

namespace flash_dist {

template <class Config>
struct FwdKvcacheLoader {
  using Work = typename Config::Work;
  using Works = typename Config::Works;
  using Keys = typename Config::Keys;
  using KTile = typename Config::KTile;

  const typename Config::Params& params;
  typename Config::Smem& smem;

  __device__ __forceinline__ void run() const {
    if (is_first()) smem.progress = {static_cast<unsigned>(fresh_block()), 0, 0, 0};
#pragma unroll 1
    while (true) {
      if (is_first()) choose_work();
      __syncwarp();
      const Work& work = smem.work[Works{smem.progress.works - 1}.stage()];
      if (work.is_closed()) return;
      if (work.has_scores()) load(work);
      __syncwarp();
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return fresh_thread() % 32; }
  __device__ __forceinline__ static bool is_first() { return lane() == 0; }

  // Passes the next work tile that has queries or uncovered rows to the consumers, or a closed work
  // tile if there is none.
  __device__ __forceinline__ void choose_work() const {
    FwdSm90Progress& own = smem.progress;
#pragma unroll 1
    while (own.number < static_cast<unsigned>(params.tiles)) {
      Work& work = next_work<Config>(params, smem);
      work.place_block(params.p, params.cache, Config::BLOCK_M, static_cast<int>(own.number));
      own.number = next_tile(own.number);
      if (!work.has_queries() && !work.sequence.uncovered_q) continue;
      work.find_keys(params.p, Config::BLOCK_M, Config::BLOCK_N);
      work.queries = own.queries;
      work.tiles = own.tiles;
      if (work.has_scores()) {
        ++own.queries;
        own.tiles += work.key_blocks();
      }
      publish_work<Config>(smem);
      return;
    }
    next_work<Config>(params, smem).close();
    publish_work<Config>(smem);
  }
  __device__ __forceinline__ unsigned next_tile(unsigned number) const {
    if (params.tickets != nullptr) number = fetch_next(params.tickets);
    return number + gridDim.x;
  }

  // Loads Q, K and V of a work tile with visible keys, in ascending order of keys.
  __device__ __forceinline__ void load(const Work& work) const {
    if (is_first()) load_queries(work);
    Keys keys{work.tiles};
    CachePlace place = find_box(work, work.bounds.begin);
#pragma unroll 1
    for (int j = work.bounds.begin; j < work.bounds.end; ++j) {
      load_own_box<Config::Q_PANELS>(work, j, place, params.k, params.k_axes,
                                     shared_address(smem.k[keys.stage()]), smem.k_barriers, keys);
      // Find the next box while the stage of V is not yet free: it becomes free later than that
      // of K.
      const CachePlace next = find_box(work, j + 1);
      load_own_box<Config::V_PANELS>(work, j, place, params.v, params.v_axes,
                                     shared_address(smem.v[keys.stage()]), smem.v_barriers, keys);
      place = next;
      keys.advance();
    }
  }

  // Returns where this lane's box of key block j is in the cache. A box past the last key gets the
  // place of the last key.
  __device__ __forceinline__ CachePlace find_box(const Work& work, int j) const {
    const int key = min(j * KEY_BLOCK + lane() * params.box_keys, work.keys.end - 1);
    return CachePlace(params.cache, work.block.batch, work.sequence.k0 + key);
  }

  __device__ __forceinline__ void load_queries(const Work& work) const {
    using QTile = typename Config::QTile;
    const FwdBlock& block = work.block;
    const typename Config::Queries queries{work.queries};
    smem.q_barriers.wait_for_place(queries);
    const uint32_t barrier = smem.q_barriers.data(queries);
    mbarrier_expect(barrier, Config::Q_PANELS * QTile::BYTES);
    load_panels<QTile, Config::Q_PANELS>(
        shared_address(smem.q[0]), params.q, barrier,
        {0, work.sequence.q0 + block.row0, block.head_in_group * params.q_axes.member,
         block.head_kv * params.q_axes.head_kv, block.batch * params.q_axes.batch});
  }

  // Loads this lane's box of key block j if any of its keys exist. There may be no memory for a box
  // without existing keys.
  template <int PANELS>
  __device__ __forceinline__ void load_own_box(const Work& work, int j, const CachePlace& place,
                                               const CUtensorMap& map, const AxisSteps& axes,
                                               uint32_t tile,
                                               const StageBarriers<Config::Plan::STAGES>& barriers,
                                               const Keys& keys) const {
    const int box = params.box_keys;
    const int first = max(work.keys.first - j * KEY_BLOCK, 0) & -box;
    const int end = min((work.keys.end - j * KEY_BLOCK + box - 1) & -box, KEY_BLOCK);
    barriers.wait_for_place(keys);
    if (is_first()) mbarrier_expect(barriers.data(keys), (end - first) * KTile::ROW_BYTES * PANELS);
    const int own = lane() * box;
    const BoxPlace at{0, place.row, 0, work.block.head_kv * axes.head_kv, place.entry * axes.batch};
    // Boxes of at least 64 keys: one lane after the other loads all panels of its box, which is
    // faster. Smaller boxes: all lanes load at once, panel by panel.
    const int step = box < 64 ? KEY_BLOCK : box;
#pragma unroll 1
    for (int row = first; row < end; row += step) {
      if (row <= own && own < min(row + step, end)) {
        load_panels<KTile, PANELS>(tile + own * KTile::ROW_BYTES, map, barriers.data(keys), at);
      }
    }
    __syncwarp();
  }

  // Loads one box per panel.
  template <class Tile, int PANELS>
  __device__ __forceinline__ static void load_panels(uint32_t tile, const CUtensorMap& map,
                                                     uint32_t barrier, BoxPlace at) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      at.column = panel * Tile::COLUMNS;
      load_box(tile + panel * Tile::BYTES, map, at, barrier);
    }
  }
};

}  // namespace flash_dist

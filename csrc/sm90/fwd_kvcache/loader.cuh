// The loading thread of a block of the forward kernel for Hopper with the bits of a cache: it chooses work
// tiles, finds the keys of each, passes it to the consumers, and starts the copies of Q, K and V.
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

  const typename Config::Params& params;
  typename Config::Smem& smem;

  __device__ __forceinline__ void run() const {
    FwdSm90Progress& own = smem.progress;
    own = {static_cast<unsigned>(fresh_block()), 0, 0, 0};
#pragma unroll 1
    while (own.number < static_cast<unsigned>(params.tiles)) {
      Work& work = next_work();
      work.place_block(params.p, Config::BLOCK_M, static_cast<int>(own.number));
      own.number = next_tile(own.number);
      if (!work.has_queries() && !work.sequence.uncovered_q) continue;
      work.find_keys(params.p, Config::BLOCK_M, Config::BLOCK_N);
      work.queries = own.queries;
      work.tiles = own.tiles;
      publish_work();
      if (work.has_queries() && work.has_keys()) load(work);
    }
    next_work().close();
    publish_work();
  }

 private:
  __device__ __forceinline__ Work& next_work() const {
    // With a counter it takes only one tile ahead: other blocks cannot take what it holds.
    const unsigned works = smem.progress.works;
    const unsigned free = params.tickets == nullptr ? works : works + WORKS - 2;
    smem.work_barriers.wait_for_place(Works{free});
    return smem.work[Works{works}.stage()];
  }
  __device__ __forceinline__ void publish_work() const {
    smem.work_barriers.arrive(Works{smem.progress.works});
    ++smem.progress.works;
  }
  __device__ __forceinline__ unsigned next_tile(unsigned number) const {
    return gridDim.x + (params.tickets == nullptr ? number : fetch_next(params.tickets));
  }

  // Loads Q, K and V of a work tile that has visible keys, from the first key to the last.
  __device__ __forceinline__ void load(const Work& work) const {
    const FwdBlock& block = work.block;
    const typename Config::Queries queries{work.queries};
    smem.q_barriers.wait_for_place(queries);
    load_tile<typename Config::QTile, Config::Q_PANELS>(
        smem.q[0], params.q, smem.q_barriers.data(queries),
        {0, work.sequence.q0 + block.row0, block.head_in_group * params.q_axes.member,
         block.head_kv * params.q_axes.head_kv, block.batch * params.q_axes.batch});
    ++smem.progress.queries;
    typename Config::Keys keys{work.tiles};
#pragma unroll 1
    for (int j = work.bounds.begin; j < work.bounds.end; ++j) {
      smem.k_barriers.wait_for_place(keys);
      load_tile<typename Config::KTile, Config::Q_PANELS>(smem.k[keys.stage()], params.k,
                                                          smem.k_barriers.data(keys),
                                                          place_of(work, j, params.k_axes));
      smem.v_barriers.wait_for_place(keys);
      load_tile<typename Config::KTile, Config::V_PANELS>(smem.v[keys.stage()], params.v,
                                                          smem.v_barriers.data(keys),
                                                          place_of(work, j, params.v_axes));
      keys.advance();
    }
    smem.progress.tiles = keys.passed;
  }

  // The first row of key block j in k or v.
  __device__ __forceinline__ static BoxPlace place_of(const Work& work, int j,
                                                      const AxisSteps& axes) {
    return {0, work.sequence.k0 + j * KEY_BLOCK, 0, work.block.head_kv * axes.head_kv,
            work.block.batch * axes.batch};
  }

  // Loads a box for each panel.
  template <class Tile, int PANELS>
  __device__ __forceinline__ static void load_tile(uint8_t* tile, const CUtensorMap& map,
                                                   uint32_t barrier, BoxPlace at) {
    mbarrier_expect(barrier, PANELS * Tile::BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      at.column = panel * Tile::COLUMNS;
      load_box(shared_address(tile) + panel * Tile::BYTES, map, at, barrier);
    }
  }
};

}  // namespace flash_dist

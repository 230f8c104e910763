// The loading thread of a block of the forward kernel for Hopper. It chooses work tiles, finds the
// keys of each, passes the tile to the consumers, and starts the copies of Q, K and V.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/semaphore.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/fwd/bias.cuh"
#include "sm90/fwd/tiles.cuh"

namespace flash_dist {

template <class Tiles>
struct FwdSm90Loader {
  using KTile = typename Tiles::KTile;
  using QTile = typename Tiles::QTile;
  using Steps = typename Tiles::Steps;
  using Keys = typename Tiles::Keys;

  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;

  __device__ __forceinline__ void run() const {
    FwdSm90Progress& own = smem.progress;
    own = {static_cast<unsigned>(fresh_block()), 0, 0, 0};
#pragma unroll 1
    while (own.number < static_cast<unsigned>(params.tiles)) {
      typename Tiles::Work& work = next_work<Tiles>(params, smem);
      work.place_block(params.p, Tiles::BLOCK_M, static_cast<int>(own.number));
      own.number = next_tile(own.number);
      if (!work.has_queries() && !work.sequence.uncovered_q) continue;
      work.find_keys(params.p, Tiles::BLOCK_M, Tiles::BLOCK_N);
      work.queries = own.queries;
      work.tiles = own.tiles;
      publish_work<Tiles>(smem);
      if (work.has_queries() && work.has_keys()) load(work);
    }
    next_work<Tiles>(params, smem).close();
    publish_work<Tiles>(smem);
  }

 private:
  __device__ __forceinline__ unsigned next_tile(unsigned number) const {
    const unsigned blocks = gridDim.x;
    return blocks + (params.tickets == nullptr ? number : fetch_next(params.tickets));
  }

  // Loads Q, K and V of a work tile that has visible keys.
  __device__ __forceinline__ void load(const typename Tiles::Work& work) const {
    load_queries(work);
    Keys keys{work.tiles}, before;
    const int last = work.bounds.end - 1;
#pragma unroll 1
    for (int j = last; j >= work.bounds.begin; --j) {
      smem.k_barriers.wait_for_place(keys);
      load_rows<Tiles::K_TILE_BYTES>(shared_address(smem.k[keys.stage()]), params.k, params.k_axes,
                                     work, j, smem.k_barriers.data(keys));
      if constexpr (Tiles::HAS_BIAS && Tiles::BIAS_LOADERS == 0) {
        if (params.bias_in_boxes) load_bias<Tiles>(params, smem, work, j, keys);
      }
      if (j < last) load_values(work, j + 1, before);
      before = keys;
      keys.advance();
    }
    load_values(work, work.bounds.begin, before);
    smem.progress.tiles = keys.passed;
  }

  __device__ __forceinline__ void load_queries(const typename Tiles::Work& work) const {
    const FwdBlock& block = work.block;
    const typename Tiles::Queries queries{work.queries};
    smem.q_barriers.wait_for_place(queries);
    const uint32_t barrier = smem.q_barriers.data(queries);
    mbarrier_expect(barrier, Tiles::Q_PANELS * QTile::BYTES);
    BoxPlace at{0, work.sequence.q0 + block.row0, block.head_in_group * params.q_axes.member,
                block.head_kv * params.q_axes.head_kv, block.batch * params.q_axes.batch};
    load_panels<QTile, Tiles::Q_PANELS>(shared_address(smem.q[queries.stage()]), params.q, at,
                                        barrier);
    ++smem.progress.queries;
  }

  __device__ __forceinline__ void load_values(const typename Tiles::Work& work, int j,
                                              const Keys& keys) const {
    smem.v_barriers.wait_for_place(keys);
    load_rows<Tiles::V_TILE_BYTES>(shared_address(smem.v[keys.stage()]), params.v, params.v_axes,
                                   work, j, smem.v_barriers.data(keys));
  }

  // Loads the rows of k or v of step j.
  template <int BYTES>
  __device__ __forceinline__ void load_rows(uint32_t tile, const CUtensorMap& map,
                                            const AxisSteps& axes, const typename Tiles::Work& work,
                                            int j, uint32_t barrier) const {
    constexpr int PANELS = BYTES / KTile::BYTES;
    const FwdBlock& block = work.block;
    const Steps steps{work.bounds};
    mbarrier_expect(barrier, BYTES);
    BoxPlace at{0, work.sequence.k0 + steps.key0(j), 0, block.head_kv * axes.head_kv,
                block.batch * axes.batch};
    if (!steps.is_list()) {
      load_panels<KTile, PANELS>(tile, map, at, barrier);
      return;
    }
#pragma unroll
    for (int part = 0; part < Steps::PARTS; ++part) {
      at.row = work.sequence.k0 + steps.key0(j, part);
      load_panels<KTile, PANELS>(tile + part * MASK_TILE * KTile::ROW_BYTES, map, at, barrier);
    }
  }

  // Loads one box per panel.
  template <class Tile, int PANELS>
  __device__ __forceinline__ static void load_panels(uint32_t tile, const CUtensorMap& map,
                                                     BoxPlace at, uint32_t barrier) {
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      at.column = panel * Tile::COLUMNS;
      load_box(tile + panel * Tile::BYTES, map, at, barrier);
    }
  }
};

// The warps that load the bias of the work tiles, each stage as soon as it is empty. A bias in boxes
// has one warp at most.
template <class Tiles>
struct FwdSm90BiasLoader {
  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;

  __device__ __forceinline__ void run() const {
    typename Tiles::Works works;
#pragma unroll 1
    while (true) {
      smem.work_barriers.wait_for_data(works);
      const typename Tiles::Work& work = smem.work[works.stage()];
      if (work.is_closed()) break;
      if (work.has_queries()) load(work);
      smem.work_barriers.release(works.stage());
      works.advance();
    }
  }

 private:
  __device__ __forceinline__ void load(const typename Tiles::Work& work) const {
    typename Tiles::Keys keys{work.tiles};
    if (!params.bias_in_boxes) return copy(work, keys);
    if (fresh_thread() % 32 > 0) return;
#pragma unroll 1
    for (int j = work.bounds.end - 1; j >= work.bounds.begin; --j, keys.advance()) {
      load_bias<Tiles>(params, smem, work, j, keys);
    }
  }

  // Starts the copies of a stage before it finishes the stage before.
  __device__ __forceinline__ void copy(const typename Tiles::Work& work,
                                       typename Tiles::Keys keys) const {
    const FwdBiasCopy<Tiles> copies{params, smem, work};
    const int last = work.bounds.end - 1;
    FwdBiasStage<Tiles> before{};
#pragma unroll 1
    for (int j = last; j >= work.bounds.begin; --j, keys.advance()) {
#pragma unroll 1
      for (int part = 0; part < Tiles::BIAS_PARTS; ++part) {
        FwdBiasStage<Tiles> next{bias_stage<Tiles>(keys, part), j, part};
        copies.start(next);
        if (j < last || part > 0) copies.template finish<1>(before);
        before = next;
      }
    }
    if (work.has_keys()) copies.template finish<0>(before);
  }
};

}  // namespace flash_dist

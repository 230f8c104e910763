// The loading warp of the kernel for the gradient of a bias on Hopper: finds the visits of each
// tile, describes them, and starts their copies. Lane 0 waits, writes and copies; all lanes look
// for visits.
#pragma once

#include "core/sequence.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/bwd_bias/visits.cuh"

namespace flash_dist {

template <class Config>
struct BiasGradientLoader {
  using Tile = typename Config::Tile;
  using Smem = typename Config::Smem;
  using Item = BiasVisitItem;
  static constexpr int PANELS = Config::PANELS;
  static constexpr int V_PANELS = Config::V_PANELS;

  const BiasGradientSm90Params& params;
  Smem& smem;
  const BwdParams& p = params.p;
  SliceRing<Config::STAGES> stages{};
  SliceRing<Config::BIAS_STAGES> biases{};
  unsigned items = 0;

  // Loads all tiles of this block.
  __device__ __forceinline__ void load() {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int number = fresh_block(); number < params.tiles; number += gridDim.x) {
      __syncwarp();  // all lanes have read the last tile
      if (lane == 0) smem.tile = {params, number, Config::BLOCK_M, Config::BLOCK_N};
      __syncwarp();
      const BiasTileWork& tile = smem.tile;
      int chunk = tile.part.first - 32;  // lane i looks at visit chunk + i
      unsigned visible = 0;              // bit i: visit chunk + i is visible and still to come
      int next = find(tile, chunk, visible);
      int flags = Item::FIRST | (next < 0 ? Item::EMPTY : 0);
#pragma unroll 1
      do {
        const int visit = max(next, 0);
        const int slot = (visit - tile.part.first) % (2 * 32);
        if (next >= 0) next = find(tile, chunk, visible);
        if (next < 0) flags |= Item::LAST;
        if (lane == 0) add(tile, visit, smem.codes[slot], flags);
        flags = 0;
      } while (next >= 0);
    }
    if (lane == 0) {
      wait_for_place();
      smem.item[items % Config::ITEMS].flags = Item::END;
      mbarrier_arrive(full());  // the stage has no panels
    }
  }

 private:
  __device__ __forceinline__ uint32_t full() const {
    return shared_address(&smem.full[stages.stage]);
  }
  // Waits until all consumer warps have read the stage's panels. Orders wgmma's reads of the
  // panels, and reads of the item whose slot is written next, before the loader's writes.
  __device__ __forceinline__ void wait_for_place() const {
    mbarrier_wait(shared_address(&smem.empty[stages.stage]), stages.parity ^ 1);
  }

  // Returns the next visit that has visible scores in the tile, or -1. Its codes are in smem.codes,
  // as are those of the visit before.
  __device__ __forceinline__ int find(const BiasTileWork& tile, int& chunk,
                                      unsigned& visible) const {
#pragma unroll 1
    while (visible == 0) {
      chunk += 32;
      if (chunk >= tile.part.end) return -1;
      const int own = chunk + threadIdx.x % 32;
      VisitCodes codes;
      if (own < tile.part.end) codes.find(params, tile, own);
      __syncwarp();  // lane 0 has read the codes that are overwritten next
      smem.codes[(own - tile.part.first) % (2 * 32)] = {codes.of[0], codes.of[1], codes.of[2],
                                                        codes.of[3]};
      visible = __ballot_sync(0xffffffffu, codes.any());
      __syncwarp();  // lane 0 may read the codes
    }
    const int lane = __ffs(visible) - 1;
    visible &= visible - 1;
    return chunk + lane;
  }

  // Passes a visit on to the consumers.
  __device__ __forceinline__ void add(const BiasTileWork& tile, int number, const int4& codes,
                                      int flags) {
    const BiasVisit visit(params, tile.part, number);
    const Sequence sequence(p, visit.batch);
    wait_for_place();
    describe(smem.item[items++ % Config::ITEMS], tile, visit, sequence, codes, flags);
    if (flags & Item::EMPTY) {
      mbarrier_arrive(full());
      stages.advance();
      return;
    }
    const int head_kv = divide(visit.head, params.by_group);
    const BoxPlace rows{0, sequence.q0 + tile.row0, visit.head - head_kv * p.group, head_kv,
                        visit.batch};
    const BoxPlace keys{0, sequence.k0 + tile.key0, 0, head_kv, visit.batch};
    load_panels<PANELS>(params.q, params.q_axes, rows, params.k, params.k_axes, keys, true);
    load_panels<V_PANELS>(params.dout, params.dout_axes, rows, params.v, params.v_axes, keys,
                          false);
    if (Config::BIAS == BiasLoads::BOXES && flags & Item::FIRST) load_bias(tile);
  }

  __device__ __forceinline__ void describe(Item& item, const BiasTileWork& tile,
                                           const BiasVisit& visit, const Sequence& sequence,
                                           const int4& codes, int flags) const {
    item.flags = flags;
    item.batch = visit.batch;
    item.head = visit.head;
    item.row0 = tile.row0;
    item.key0 = tile.key0;
    item.code[0] = codes.x, item.code[1] = codes.y, item.code[2] = codes.z, item.code[3] = codes.w;
    item.statistics = statistics_begin(p, visit.batch, visit.head, sequence.q0) + tile.row0;
    item.sum =
        (static_cast<int64_t>(tile.part.index) * p.seqlen_q + tile.row0) * p.seqlen_k + tile.key0;
  }

  // Loads the panels of a product, one per stage. has_place: the first stage is known to be empty.
  template <int COUNT>
  __device__ __forceinline__ void load_panels(const CUtensorMap& a, const AxisSteps& a_axes,
                                              const BoxPlace& rows, const CUtensorMap& b,
                                              const AxisSteps& b_axes, const BoxPlace& keys,
                                              bool has_place) {
#pragma unroll
    for (int panel = 0; panel < COUNT; ++panel) {
      if (!has_place || panel > 0) wait_for_place();
      typename Config::Stage& stage = smem.stage[stages.stage];
      // The barrier completes when both boxes are in shared memory. It orders these copies, and for
      // a visit's first stage also the stores to its item, before the consumers' reads.
      mbarrier_expect(full(), 2 * Tile::BYTES);
      load_panel(stage.queries, a, a_axes, rows, panel);
      load_panel(stage.keys, b, b_axes, keys, panel);
      stages.advance();
    }
  }
  __device__ __forceinline__ void load_panel(uint8_t* to, const CUtensorMap& map,
                                             const AxisSteps& axes, const BoxPlace& at,
                                             int panel) const {
    load_box(shared_address(to), map,
             {panel * Tile::COLUMNS, at.row, at.member * axes.member, at.head_kv * axes.head_kv,
              at.batch * axes.batch},
             full());
  }

  // Loads the bias of a tile: one stage in 16 bits, or two in fp32. Called after the copies of the
  // tile's first visit have started, so that these do not wait for a stage of the bias.
  __device__ __forceinline__ void load_bias(const BiasTileWork& tile) {
    const int width = p.bias.is_fp32 ? 2 : 1;  // columns of 16 bits per key
    BoxPlace at{width * tile.key0, tile.row0, 0, tile.part.head * params.bias_axes.head_kv,
                tile.part.batch * params.bias_axes.batch};
#pragma unroll 1
    for (int i = 0; i < width; ++i, biases.advance()) {
      // Orders the consumers' reads of this stage, for an earlier tile, before the copies.
      mbarrier_wait(shared_address(&smem.bias_empty[biases.stage]), biases.parity ^ 1);
      const uint32_t barrier = shared_address(&smem.bias_full[biases.stage]);
      const uint32_t to = shared_address(smem.bias[biases.stage]);
      // Orders the copies before the consumers' reads.
      mbarrier_expect(barrier, Config::BIAS_BYTES);
#pragma unroll
      for (int panel = 0; panel < 2; ++panel, at.column += Tile::COLUMNS) {
        load_box(to + panel * Tile::BYTES, params.bias, at, barrier);
      }
    }
  }
};

}  // namespace flash_dist

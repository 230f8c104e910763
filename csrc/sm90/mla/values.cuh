// Computes O of calls with few work tiles of latent keys and at most few_key_blocks key blocks.
// sm90/mla/kernel.cuh has computed P of all key blocks in parallel and stored it. A group has as
// many products in sequence as in that kernel, but each block computes only 64 columns.
//
// Grid      x = group of a work tile, counted over all work tiles, and 64 columns of O.
// Block     A warpgroup that multiplies, and a warp that loads.
// Shared    A ring of stages: P of a tile, and the tile's values in these columns.
#pragma once

#include "core/decode_rows.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/mla/config.h"
#include "sm90/mla/output.cuh"
#include "sm90/mla/place.cuh"
#include "sm90/mla/weights.cuh"
#include "sm90/rows.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct MlaValuesSm90Config
    : Config<MlaValuesSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = MlaValuesSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int BLOCK_ROWS = LATENT_TILE;
  static constexpr int BLOCK_N = LATENT_TILE;
  static constexpr int TILES = KEY_BLOCK / BLOCK_N;
  static constexpr int STAGES = Plan::STAGES;
  using Splits = DecodeSplits<THREADS, LATENT_SOFTMAX_BLOCKS>;
  using Tile = Panels<LATENT_TILE>;
  using Stages = Ring<STAGES>;
  static constexpr int COLUMNS = Tile::COLUMNS;
  static constexpr int PANELS = HEAD_DIM_V / COLUMNS;
  static_assert(THREADS == WARPGROUP + 32 && STAGES % TILES == 0);

  struct Stage {
    uint8_t p[Tile::BYTES], v[Tile::BYTES];
  };
  struct Smem {
    alignas(1024) Stage stages[STAGES];
    // For each tile of a group and each row: first top and sum, then the factors of O and of P.
    float2 factors[Splits::GROUP * TILES][BLOCK_ROWS];
    float2 totals[BLOCK_ROWS];  // top and sum of the group
    StageBarriers<STAGES> barriers;
    uint64_t stats_full;
    typename Splits::Smem counting;
    Splits splits;
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

// Finds the first key block of group `number`, counted over all work tiles. There are at most
// MOST_FEW_TILES tiles, two per lane. Returns false if there is no such group.
template <class Splits>
__device__ __forceinline__ bool find_group(const DecodeParams& p, const Splits& splits,
                                           typename Splits::Smem& smem, int number,
                                           DecodeCursor& at) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto count = [&](int tile) {
    if (tile >= p.batch * p.row_tiles * p.num_heads_kv) return 0;
    const RowTile own = RowTile::at(p, tile / p.num_heads_kv);
    const DecodeExtent extent(p, own);
    return own.place < extent.tiles ? count_groups<Splits::GROUP>(extent) : 0;
  };
  static_assert(MOST_FEW_TILES == 2 * 32);
  const int first = count(2 * lane), both = first + count(2 * lane + 1);
  const int end = sum_until(both);
  const unsigned behind = __ballot_sync(0xffffffffu, number < end);
  if (behind == 0) return false;
  const int owner = __ffs(static_cast<int>(behind)) - 1;
  int group = number - __shfl_sync(0xffffffffu, end - both, owner);
  const int of_first = __shfl_sync(0xffffffffu, first, owner);
  const int is_second = group >= of_first;
  if (is_second) group -= of_first;
  at = splits.find_tile(p, smem, 2 * owner + is_second);
  if (group == 0) return true;
  const int key_block = (at.extent.first / Splits::GROUP + group) * Splits::GROUP;
  at.position += key_block - at.key_block;
  at.key_block = key_block;
  return true;
}

// Loads, in one warp, P and the values of key blocks.
template <class Config>
__device__ __forceinline__ void load_values(const MlaSm90Params& params,
                                            typename Config::Smem& smem, const DecodeCursor& at,
                                            int key_blocks, int panel) {
  using Tile = typename Config::Tile;
  constexpr int PIECES = KEY_BLOCK / PAGE_STEP;
  const LatentParams& p = params.p;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool issues = lane == 0, second_first = panel >= Config::PANELS / 2;
  const int box = params.box_keys;
  typename Config::Stages ring;
  int next_entry = 0, next_row = 0;
  const auto find = [&](int number) {
    const int key = (at.key_block + number) * KEY_BLOCK + lane % PIECES * PAGE_STEP;
    if (number >= key_blocks || key >= at.extent.visible_end) return;
    const CachePlace place(p.cache, at.batch, at.extent.leftpad + key);
    next_entry = place.entry;
    next_row = place.row;
  };
  find(0);
#pragma unroll 1
  for (int number = 0; number < key_blocks; ++number) {
    const int entry = next_entry, row = next_row;
    const int exist = at.extent.visible_end - (at.key_block + number) * KEY_BLOCK;
#pragma unroll 1
    for (int i = 0; i < Config::TILES; ++i, ring.advance()) {
      const int tile = second_first ? 1 - i : i;
      const int keys = min(max(exist - tile * Config::BLOCK_N, 0), Config::BLOCK_N);
      auto& stage = smem.stages[ring.stage()];
      smem.barriers.wait_for_place(ring);
      if (issues) {
        const uint32_t full = smem.barriers.data(ring);
        mbarrier_expect(full, Tile::BYTES + (keys + box - 1 & -box) * Tile::ROW_BYTES);
        const int64_t number_of_tile = int64_t{at.position + number} * Config::TILES + tile;
        load_bytes(shared_address(stage.p), p.weights + number_of_tile * (Tile::BYTES / 2),
                   Tile::BYTES, full);
      }
      __syncwarp();
#pragma unroll 1
      for (int key = 0; key < keys; key += box) {
        const int piece = (tile * Config::BLOCK_N + key) / PAGE_STEP;
        const BoxPlace from{panel * Tile::COLUMNS, __shfl_sync(0xffffffffu, row, piece), 0,
                            at.head * params.k_axes.head_kv,
                            __shfl_sync(0xffffffffu, entry, piece) * params.k_axes.batch};
        if (!issues) continue;
        load_box(shared_address(stage.v) + key * Tile::ROW_BYTES, params.k, from,
                 smem.barriers.data(ring));
      }
      if (i == 0) find(number + 1);
    }
  }
}

// The warpgroup that multiplies.
template <class Config>
class LatentValues {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Tile = typename Config::Tile;
  using Weights = LatentWeights<Target, T>;
  using Place = WarpgroupPlace<Config>;
  static constexpr int OT = Config::COLUMNS / 8;

 public:
  __device__ __forceinline__ LatentValues(const LatentParams& p, typename Config::Smem& smem,
                                          const DecodeCursor& at, int panel)
      : p_(p), smem_(smem), at_(at), own_{panel} {}

  // Adds key blocks of one work tile, in complete groups, to O. owns_tile: true if these are all
  // key blocks of the work tile.
  __device__ __forceinline__ void run(int key_blocks, bool owns_tile) {
    const int end = at_.position + key_blocks;
    Partial<OT> tile;
    tile.clear();
    while (at_.position < end) {
      const int owner = smem_.splits.owner(at_.position);
      group_.clear();
      if (own_.part < Config::PANELS / 2) {
        add_group<false>();
      } else {
        add_group<true>();
      }
      const DecodeCursor last = before();
      if (!owns_tile) {
        store_partial(p_, group_, smem_.splits.group_partial(p_, last, owner), own_);
      } else {
        tile.combine(group_);
        if (at_.position == end) store_tile(p_, tile, last, own_);
      }
    }
  }

 private:
  // The tiles of a key block in the order in which they are added: P multiplied by its factors, the
  // factors of O before each tile, and the addresses of the values.
  struct KeyBlockWeights {
    Weights p[2];
    float keep[2][2];
    uint32_t v[2];

    // Returns whether no lane of the warp rescales O before tile i.
    __device__ __forceinline__ bool keeps_all(int i) const {
      return __all_sync(0xffffffffu, keep[i][0] == 1.0f && keep[i][1] == 1.0f);
    }
  };

  // Returns the cursor at the previous key block.
  __device__ __forceinline__ DecodeCursor before() const {
    DecodeCursor at = at_;
    --at.position;
    --at.key_block;
    return at;
  }

  template <bool SECOND_FIRST>
  __device__ __forceinline__ void add_group() {
    const int group_end = at_.group_end<Config::Splits::GROUP>();
    const int begin = at_.position;
    find_factors<SECOND_FIRST>(group_end - begin);
    KeyBlockWeights now;
    take_key_block<SECOND_FIRST>(now, 0);
#pragma unroll 1
    while (true) {
      if (!now.keeps_all(0)) rescale(group_.out, now.keep[0]);
      multiply_values<Config>(group_.out, now.p[0], now.v[0]);
      if constexpr (!SECOND_FIRST) {
        if (!now.keeps_all(1)) {
          wgmma_wait<0>();
          hold(group_.out.x[0]);
          rescale(group_.out, now.keep[1]);
        }
      }
      multiply_values<Config>(group_.out, now.p[1], now.v[1]);
      ++at_.position;
      ++at_.key_block;
      const bool goes_on = at_.position < group_end;
      KeyBlockWeights next;
      if (goes_on) take_key_block<SECOND_FIRST>(next, at_.position - begin);  // overlaps products
      wgmma_wait<0>();
      hold(group_.out.x[0]);
      hold(now.p[0].a);
      hold(now.p[1].a);
      smem_.barriers.release(released_++ % Config::STAGES);
      smem_.barriers.release(released_++ % Config::STAGES);
      if (!goes_on) break;
      now = next;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 total = smem_.totals[own_.row(h)];
      group_.top[h] = total.x, group_.sum[h] = total.y;
    }
  }

  // Finds the factors of all tiles of a group, and the group's tops and sums.
  template <bool SECOND_FIRST>
  __device__ __forceinline__ void find_factors(int key_blocks) {
    const uint32_t full = shared_address(&smem_.stats_full);
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, WARPGROUP);  // all threads have read the previous factors
    if (threadIdx.x == 0) {
      const int tiles = key_blocks * Config::TILES;
      const int bytes = tiles * static_cast<int>(sizeof smem_.factors[0]);
      mbarrier_expect(full, bytes);
      load_bytes(shared_address(smem_.factors),
                 p_.tile_stats + int64_t{at_.position} * Config::TILES * LATENT_TILE, bytes, full);
    }
    mbarrier_wait(full, groups_++ % 2);
    if (threadIdx.x < LATENT_TILE) find_factors_of_row<SECOND_FIRST>(threadIdx.x, key_blocks);
    barrier_sync(ALL_CONSUMERS, WARPGROUP);  // all factors are stored
  }
  template <bool SECOND_FIRST>
  __device__ __forceinline__ void find_factors_of_row(int row, int key_blocks) {
    float top = -INFINITY, sum_first = 0.0f, sum_second = 0.0f;
#pragma unroll 4
    for (int i = 0; i < key_blocks; ++i) {
      float2 &first = smem_.factors[2 * i][row], &second = smem_.factors[2 * i + 1][row];
      const KeyBlockCombine both(top, first.x, second.x);
      const Combine one(top, first.x), two(one.top, second.x);
      sum_first = __fmul_rn(one(sum_first, first.y), two.keep);
      sum_second = add_scaled(sum_second, second.y, both.keep, both.add_second);
      // x: factor of O before the tile. y: factor of P.
      first = SECOND_FIRST ? float2{1.0f, both.add_first} : float2{one.keep, one.add};
      second = SECOND_FIRST ? float2{both.keep, both.add_second} : float2{two.keep, two.add};
      top = both.top;
    }
    // NOTE: these are the sums of both consumers of sm90/mla/kernel.cuh, added as there.
    smem_.totals[row] = {top, __fadd_rn(sum_first, sum_second)};
  }

  // Waits for key block `number` of the group, and loads its P and factors.
  template <bool SECOND_FIRST>
  __device__ __forceinline__ void take_key_block(KeyBlockWeights& taken, int number) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int tile = SECOND_FIRST ? 1 - i : i;
      float add[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 factors = smem_.factors[Config::TILES * number + tile][own_.row(h)];
        taken.keep[i][h] = factors.x, add[h] = factors.y;
      }
      taken.v[i] = take_tile(taken.p[i], tile);
      taken.p[i].scale(add);
    }
  }

  // Waits for a tile of the key block, loads its P, and zeroes the values of keys from visible_end
  // on. Returns the address of the values.
  __device__ __forceinline__ uint32_t take_tile(Weights& weights, int tile) {
    auto& stage = smem_.stages[ring_.stage()];
    smem_.barriers.wait_for_data(ring_);
    ring_.advance();
    weights.load(shared_address(stage.p));
    const uint32_t v = shared_address(stage.v);
    const int key0 = at_.key_block * KEY_BLOCK + tile * Config::BLOCK_N;
    if (at_.extent.visible_end < key0 + Config::BLOCK_N) {
      clear_rows<Tile, Config::BLOCK_N, 1, WARPGROUP>(v, {0, at_.extent.visible_end - key0},
                                                      static_cast<int>(threadIdx.x));
      fence_proxy_async();
      barrier_sync(ALL_CONSUMERS, WARPGROUP);
    }
    return v;
  }

  const LatentParams& p_;
  typename Config::Smem& smem_;
  DecodeCursor at_;
  const Place own_;
  Partial<OT> group_;
  typename Config::Stages ring_;
  unsigned released_ = 0, groups_ = 0;  // number of stages released, and of groups begun
};

template <class Config>
__device__ __forceinline__ void mla_values_sm90_block(const MlaSm90Params& params) {
  using Target = typename Config::Target;
  constexpr int GROUP = Config::Splits::GROUP;
  const LatentParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_map(params.k);
    smem.barriers.make(WARPS_OF_GROUP);
    mbarrier_init(shared_address(&smem.stats_full), 1);
    mbarriers_made();
  }
  let_next_start<Target>();
  const typename Config::Splits splits(p, smem.counting);
  if (splits.total > p.few_key_blocks) return wait_for_previous<Target>();
  const int group = static_cast<int>(blockIdx.x) / Config::PANELS,
            panel = static_cast<int>(blockIdx.x) % Config::PANELS;
  DecodeCursor at;
  if (!find_group(p, splits, smem.counting, group, at)) return wait_for_previous<Target>();
  // True if no other split has a part of the tile. This is the rule of core/decode_combine.h.
  const bool owns_tile = splits.grain == Grain::TILE ||
                         splits.owner(at.tile_begin()) == splits.owner(at.last_group<GROUP>());
  if (owns_tile && at.position > at.tile_begin()) return wait_for_previous<Target>();
  const int end = owns_tile ? at.tile_end() : at.group_end<GROUP>();
  if (threadIdx.x == 0) smem.splits = splits;
  __syncthreads();              // shared memory and barriers are initialized
  wait_for_previous<Target>();  // the previous kernel has stored P

  if (threadIdx.x < WARPGROUP) {
    LatentValues<Config>(p, smem, at, panel).run(end - at.position, owns_tile);
  } else {
    load_values<Config>(params, smem, at, end - at.position, panel);
  }
}

}  // namespace flash_dist

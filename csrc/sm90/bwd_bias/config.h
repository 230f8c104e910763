// Tiles, threads and shared memory of the kernel for the gradient of a bias on Hopper.
#pragma once

#include "bwd_bias_plans.h"
#include "core/bias_visits.cuh"
#include "core/config.h"
#include "core/panels.cuh"
#include "core/schedule.cuh"
#include "sm90/bwd/config.h"
#include "sm90/stages.cuh"

namespace flash_dist {

struct BiasGradientSm90Params : DkdvBiasSm90Params {
  void* sums;                  // [splits, batches, heads, seqlen_q, seqlen_k]
  bool rounds;                 // true: sums are in the dtype of q; false: in fp32
  int batches, heads;          // of the bias: 1 if broadcast
  int visits, splits;          // see BiasGradientParams
  int query_tiles, key_tiles;  // tiles of BLOCK_M x BLOCK_N
  int tiles;                   // of all splits, batch entries and heads of the bias
  // The loading warp finds tiles and visits without divisions.
  Divisor by_key_tiles, by_query_tiles, by_heads, by_batches, by_group;
};

// Returns part `index`, like BiasPart's constructor.
__device__ __forceinline__ BiasPart find_part(const BiasGradientSm90Params& p, int index) {
  const int rest = divide(index, p.by_heads);
  const int split = divide(rest, p.by_batches);
  BiasPart part;
  part.head = index - rest * p.heads;
  part.batch = rest - split * p.batches;
  part.index = index;
  part.first = 0;
  part.end = p.visits;
  if (p.splits > 1) part.take_split(p, split);
  return part;
}

// A block's tile of the bias, and its visits.
struct BiasTileWork {
  int row0, key0;  // first query and key
  BiasPart part;

  __device__ __forceinline__ BiasTileWork(const BiasGradientSm90Params& p, int number, int block_m,
                                          int block_n) {
    const int rest = divide(number, p.by_key_tiles);
    const int part_index = divide(rest, p.by_query_tiles);
    const int query_tile = rest - part_index * p.query_tiles;
    // The query tile's index shifts the key tiles. Otherwise a block could get the same key tile in
    // each round, and thus only long or only short tiles of a causal mask.
    const int shifted = number - rest * p.key_tiles + query_tile;
    const int key_tile = shifted - divide(shifted, p.by_key_tiles) * p.key_tiles;
    row0 = query_tile * block_m;
    key0 = key_tile * block_n;
    part = find_part(p, part_index);
  }
};

// One visit of a tile: the products for a batch entry and a query head.
struct BiasVisitItem {
  enum Flags : int { FIRST = 1, LAST = 2, EMPTY = 4, END = 8 };
  int flags;           // FIRST, LAST: of the tile's visits. EMPTY: no products. END: no more tiles
  int batch, head;     // of the visit
  int row0, key0;      // first query and key of the tile
  int code[4];         // mask codes of the tile's quarters, at 2 * (query half) + key half
  int64_t statistics;  // index of row0's lse and delta
  int64_t sum;         // index of the tile's first sum
};

template <class Plan_, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          BiasLoads BIAS_>
struct BiasGradientSm90ConfigOf : Config<Plan_, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = Plan_;
  using Params = BiasGradientSm90Params;
  static constexpr bool HAS_SCORE_MOD = false;
  static constexpr BiasLoads BIAS = BIAS_;
  static constexpr int CONSUMERS = Plan::WARPS / 4 - 1;  // warpgroups with 64 queries each
  static constexpr int BLOCK_M = CONSUMERS * MASK_TILE;
  static constexpr int BLOCK_N = 2 * MASK_TILE;
  static_assert(CONSUMERS == 2, "two halves of a list's entries");
  static constexpr int LOADER_REGISTERS = 56;
  static constexpr int CONSUMER_REGISTERS = 224;
  static_assert(has_registers(CONSUMERS, LOADER_REGISTERS, CONSUMER_REGISTERS));

  using Tile = Panels<BLOCK_M>;
  static_assert(BLOCK_M == BLOCK_N, "panels of both operands are alike");
  static constexpr int PANELS = Tile::count(HEAD_DIM);
  static constexpr int V_PANELS = Tile::count(HEAD_DIM_V);
  static constexpr int STAGES = Plan::STAGES;
  static_assert(STAGES >= PANELS + V_PANELS, "the first visit's panels precede the bias");

  // A stage of the bias holds 128 keys in 16 bits, or 64 keys in fp32.
  static constexpr int BIAS_STAGES = Plan::BIAS_STAGES;
  static constexpr int BIAS_BYTES = 2 * Tile::BYTES;
  static_assert(BIAS_STAGES >= 2, "a tile of fp32 takes two");

  // NOTE: the loader is at most STAGES items ahead of any consumer, because each item takes at
  // least one stage. With one more slot, it never overwrites an item that is being read.
  static constexpr int ITEMS = 8;
  static_assert(ITEMS > STAGES);

  struct Stage {
    alignas(1024) uint8_t queries[Tile::BYTES];  // 64 columns of Q or dO
    alignas(1024) uint8_t keys[Tile::BYTES];     // 64 columns of K or V
  };
  struct Smem {
    Stage stage[STAGES];
    alignas(1024) uint8_t bias[BIAS_STAGES][BIAS_BYTES];
    BiasVisitItem item[ITEMS];
    // The loader's tile, and the mask codes of the visits that its lanes look at.
    BiasTileWork tile;
    int4 codes[2 * 32];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t bias_full[BIAS_STAGES], bias_empty[BIAS_STAGES];
    __device__ Smem() = delete;  // overlaid on shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct BiasGradientSm90Config
    : BiasGradientSm90ConfigOf<BiasGradientSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                               HEAD_DIM, HEAD_DIM_V, PLAN, BiasLoads::BOXES> {};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct BiasGradientAnySm90Config
    : BiasGradientSm90ConfigOf<BiasGradientAnySm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                               HEAD_DIM, HEAD_DIM_V, PLAN, BiasLoads::ELEMENTS> {};

}  // namespace flash_dist

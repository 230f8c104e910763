// Tiles, threads and shared memory of the dK/dV kernel for Hopper in which each block sums half of
// the columns.
#pragma once

#include "bwd_halves_plans.h"
#include "sm90/bwd/config.h"

namespace flash_dist {

struct DkdvHalvesSm90Params : DkdvSm90Params {
  bool sums_dk;  // true: this launch sums dK; false: dV, which is summed first
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DkdvHalvesSm90Config
    : Config<DkdvHalvesSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = DkdvHalvesSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  using Params = DkdvHalvesSm90Params;
  static_assert(HEAD_DIM == HEAD_DIM_V);
  static constexpr bool HAS_SCORE_MOD = false;
  static constexpr int CLUSTER = 2;
  static constexpr int CONSUMERS = Plan::WARPS / 4 - 1;  // warpgroups with 64 keys each
  static constexpr int CONSUMER_WARPS = CONSUMERS * WARPS_OF_GROUP;
  static constexpr int BLOCK_M = MASK_TILE;  // queries of an item
  static constexpr int BLOCK_N = CONSUMERS * 64;
  static constexpr int BLOCK_ROWS = BLOCK_N;
  static constexpr int COLUMNS = HEAD_DIM / CLUSTER;  // columns of the sum per block
  static constexpr int SLICE = Plan::SLICE;           // columns of Q or dO in a stage
  static constexpr int SLICES = HEAD_DIM / SLICE;     // slices of an item's first product
  static constexpr int SUM_SLICES = COLUMNS / SLICE;  // slices of an item's second product
  static constexpr int LOADER_REGISTERS = 24;         // for setmaxnreg
  static constexpr int CONSUMER_REGISTERS = registers_left(CONSUMERS, 1, LOADER_REGISTERS);
  static_assert(CONSUMERS == 2, "two halves of a list's entries, and of the registers");

  using Slices = SliceRing<Plan::STAGES>;
  using KTile = Panels<BLOCK_N>;
  using QTile = Panels<BLOCK_M>;
  static constexpr int PANELS = KTile::count(HEAD_DIM);
  static constexpr int V_PANELS = PANELS;
  static constexpr int SLICE_PANELS = QTile::count(SLICE);
  static constexpr int SLICE_BYTES = SLICE_PANELS * QTile::BYTES;
  static_assert(SLICE % 64 == 0 && HEAD_DIM % SLICE == 0 && COLUMNS % SLICE == 0);
  static_assert(CONSUMERS * DS_TILE_BYTES <= SLICE_BYTES, "P of an item is a slice, too");
  // A warpgroup holds at most SUM_SLICES + 2 slices that it has not released: those of one second
  // product, P, and the first slice of the next second product.
  static_assert(SLICES > 1, "the second one ends the product before");
  static_assert(Plan::STAGES >= SUM_SLICES + 2,
                "a consumer would wait for what it does not release");

  // Returns the number of pairs of items; each block of the cluster computes one item of a pair. If
  // the number of items is odd, the second block also reads the last item, but treats it as fully
  // masked.
  __device__ __forceinline__ static int pairs(int items) { return (items + 1) / 2; }
  // The number of pairs whose items are in shared memory. The loading thread is less than two pairs
  // ahead of the consumers.
  static constexpr int PAIRS = 4;
  static constexpr int ITEMS = 2 * PAIRS;

  // Data from the other block. Each warp receives it from the warp with the same keys.
  struct Exchange {
    alignas(128) uint4 fragments[CONSUMER_WARPS][BLOCK_M / 16][32];  // A operands, by lanes
    uint64_t full[CONSUMER_WARPS];   // this block has received fragments
    uint64_t empty[CONSUMER_WARPS];  // the other block has read this block's fragments
    static constexpr int WARP_BYTES = BLOCK_M / 16 * 32 * sizeof(uint4);
  };
  struct Smem {
    alignas(1024) uint8_t keys[PANELS * KTile::BYTES];  // K, or V; reused to stage the sum
    alignas(1024) uint8_t slices[Plan::STAGES][SLICE_BYTES];
    Exchange exchange;
    alignas(16) float statistics[PAIRS][BLOCK_M];  // lse in base 2, or delta, of this block's items
    DkdvItem item[ITEMS];
    DkdvSm90Work work;
    uint64_t keys_full, full[Plan::STAGES], empty[Plan::STAGES];
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed

    // Initializes the barriers. Called by one thread.
    __device__ __forceinline__ void make_barriers() {
      mbarrier_init(shared_address(&keys_full), 1);
      for (uint64_t& one : full) mbarrier_init(shared_address(&one), 1);
      for (uint64_t& one : empty) mbarrier_init(shared_address(&one), CONSUMER_WARPS);
      for (uint64_t& one : exchange.full) mbarrier_init(shared_address(&one), 1);
      for (uint64_t& one : exchange.empty) mbarrier_init(shared_address(&one), 1);
      mbarriers_made();
      for (uint64_t& one : exchange.full) {
        mbarrier_expect(shared_address(&one), Exchange::WARP_BYTES);
      }
    }
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DqGemmHalvesSm90Config : DqGemmSm90ConfigOf<DqGemmHalvesSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>,
                                                   Target, T, HEAD_DIM, HEAD_DIM_V, PLAN, 2> {};

}  // namespace flash_dist

// Tiles, threads and shared memory of the kernels that read a cache of latent keys for many heads.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/maps.h"
#include "core/panels.cuh"
#include "decode_plans.h"
#include "plans.h"
#include "ptx/registers.cuh"
#include "sm90/stages.cuh"

namespace flash_dist {

struct MlaSm90Params {
  alignas(128) CUtensorMap k;
  AxisSteps k_axes;
  int box_keys;  // keys per box: 64 (a tile), or 16, which are contiguous in every cache
  LatentParams p;
};

// Returns the split of this block. If work tiles have more rows than a block, two adjacent blocks
// share a split, and read its keys at about the same time. The blocks of a cluster share a split,
// too.
template <class Config>
__device__ __forceinline__ int split_of_block(const DecodeParams& p) {
  return Config::CLUSTER > 1 || p.block_rows > Config::BLOCK_ROWS ? fresh_block() / 2
                                                                  : fresh_block();
}
template <class Config>
__device__ __forceinline__ int block_row0(const DecodeParams& p) {
  return p.block_rows > Config::BLOCK_ROWS ? fresh_block() % 2 * Config::BLOCK_ROWS : 0;
}

// Registers per thread of each role (setmaxnreg). BLOCKS: blocks per cluster. In a block with two
// consumers, the loader gives some of its registers to the consumers.
template <int BLOCKS>
struct LatentRegisters {
  static constexpr int LOADER_REGISTERS = 40;
  static constexpr int CONSUMER_REGISTERS = registers_left(2, 1, LOADER_REGISTERS);
};
// NOTE: with one consumer there are enough registers at launch, but without a limit ptxas
// serializes wgmma (C7515).
template <>
struct LatentRegisters<2> {
  static constexpr int LOADER_REGISTERS = 128, KEPT_REGISTERS = 240;
};

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          int CLUSTER_ = 1>
struct MlaSm90ConfigOf : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V>, LatentRegisters<CLUSTER_> {
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int CLUSTER = CLUSTER_;  // blocks per cluster; with two, each has one consumer
  static constexpr int CONSUMERS =
      (THREADS / WARPGROUP - 1) * CLUSTER;  // the consumers share the columns of O
  static constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
  static constexpr int COLUMNS = HEAD_DIM_V / CONSUMERS;  // columns of O per consumer
  static constexpr int QUERY_LOADERS = WARPGROUP - 32;    // threads that load queries
  static constexpr int BLOCK_ROWS = 64;
  static constexpr int BLOCK_N = Plan::BLOCK_N;      // keys per tile
  static constexpr int TILES = KEY_BLOCK / BLOCK_N;  // tiles per key block, one for each consumer
  using Splits = DecodeSplits<THREADS, LATENT_SOFTMAX_BLOCKS>;
  using Tile = Panels<64>;  // layout of Q, K and P
  static constexpr int PANELS = Tile::count(HEAD_DIM);
  static constexpr int OWN_PANELS = COLUMNS / Tile::COLUMNS;  // panels of V per consumer
  static constexpr int V_PANELS = CONSUMERS * OWN_PANELS;
  static constexpr int P_PANEL = V_PANELS;     // panel without values; after S, P is stored there
  static constexpr int CHUNKS = HEAD_DIM / 8;  // 16-byte chunks per row
  // Number of key blocks whose cursors may be read. When the loader begins key block n, the
  // consumers have finished key block n - CURSORS.
  static constexpr int CURSORS = 2;
  static_assert(CONSUMERS == 2 && BLOCK_ROWS == 64 && BLOCK_N == 64);
  static_assert(TILES == CONSUMERS && TILES == Plan::STAGES && PANELS == V_PANELS + 1);
  static_assert(Splits::GROUP == LATENT_SOFTMAX_BLOCKS, "O of a group stays in registers");

  // panel_count: the number of panels of a tile that consumer `part` reads last. These are the
  // panels with its columns of the values and, if the other consumer computes S of the tile, the
  // one with P. panel_of: the i-th of these panels.
  __host__ __device__ static constexpr int panel_count(int tile, int part) {
    return OWN_PANELS + (tile != part);
  }
  __host__ __device__ static constexpr int panel_of(int part, int i) {
    return i < OWN_PANELS ? part * OWN_PANELS + i : P_PANEL;
  }
  // Returns the i-th panel of a tile in the order in which S uses its panels: those that arrive
  // first come first.
  __host__ __device__ static constexpr int scores_panel(int tile, int i) {
    return i < V_PANELS ? (tile * OWN_PANELS + i) % V_PANELS : P_PANEL;
  }

  struct Smem {
    alignas(1024) uint8_t k[TILES][PANELS * Tile::BYTES];
    alignas(1024) uint8_t q[PANELS * Tile::BYTES];
    float tops[TILES][BLOCK_ROWS];  // top of each row in each tile
    float sums[TILES][BLOCK_ROWS];  // [i]: sum of each row over tile i of a group's key blocks
    uint64_t k_full[TILES][PANELS], k_empty[TILES][CONSUMERS];
    uint64_t q_full, q_empty;
    typename Splits::Smem counting;
    Splits splits;                     // of thread 0; only its thread-independent members are used
    int2 bounds;                       // key blocks [begin, end) of the split
    DecodeCursor key_blocks[CURSORS];  // cursors of the last key blocks loaded
    __device__ Smem() = delete;        // only a layout of shared memory, never constructed

    // Initializes the barriers. Called by one thread.
    __device__ __forceinline__ void make_barriers() {
      for (int tile = 0; tile < TILES; ++tile) {
        for (uint64_t& full : k_full[tile]) mbarrier_init(shared_address(&full), 1);
        for (uint64_t& empty : k_empty[tile]) {
          mbarrier_init(shared_address(&empty), WARPS_OF_GROUP);
        }
      }
      mbarrier_init(shared_address(&q_full), QUERY_LOADERS);
      mbarrier_init(shared_address(&q_empty), CONSUMERS * WARPS_OF_GROUP);
      mbarriers_made();
    }
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaSm90Config =
    MlaSm90ConfigOf<MlaSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MlaWeightsSm90Config = MlaSm90ConfigOf<MlaWeightsSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target,
                                             T, HEAD_DIM, HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

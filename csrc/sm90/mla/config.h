// Tiles, threads and shared memory of the kernel that reads a cache of latent keys for many heads.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/maps.h"
#include "core/panels.cuh"
#include "decode_plans.h"
#include "plans.h"
#include "sm90/stages.cuh"

namespace flash_dist {

struct MlaSm90Params {
  alignas(128) CUtensorMap k;
  AxisSteps k_axes;
  int box_keys;  // of a box: a whole tile, or those that lie together in every cache
  DecodeParams p;
};

// Panels of a tile of keys whose last reads are by the same warpgroup at the same time.
struct PanelGroup {
  int number, first, count;
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct MlaSm90Config
    : Config<MlaSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = MlaSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int CONSUMERS = THREADS / WARPGROUP - 1;  // which share the columns of O
  static constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
  static constexpr int COLUMNS = HEAD_DIM_V / CONSUMERS;  // of O, for each consumer
  static constexpr int QUERY_LOADERS = WARPGROUP - 32;    // threads; a warp loads keys
  static constexpr int LOADER_REGISTERS = 56;             // setmaxnreg
  static constexpr int CONSUMER_REGISTERS = registers_left(CONSUMERS, 1, LOADER_REGISTERS);
  static constexpr int BLOCK_ROWS = 64;
  static constexpr int BLOCK_N = Plan::BLOCK_N;      // keys of a tile
  static constexpr int TILES = KEY_BLOCK / BLOCK_N;  // of a key block
  static constexpr int STAGES = Plan::STAGES;
  // Key blocks whose cursors a consumer may still read, rounded up to a power of two. While the
  // second consumer is at one, the loader is at most at the first tile of the third behind it.
  static constexpr int CURSORS = 4;
  using Splits = DecodeSplits<THREADS, LATENT_SOFTMAX_BLOCKS>;
  using Tile = Panels<64>;  // of Q and of K
  using Stages = Ring<STAGES>;
  static constexpr int PANELS = Tile::count(HEAD_DIM);
  static constexpr int OWN_PANELS = COLUMNS / Tile::COLUMNS;  // of V, of one consumer
  static constexpr int V_PANELS = CONSUMERS * OWN_PANELS;
  static constexpr int CHUNKS = HEAD_DIM / 8;  // of 16 bytes, in a row
  static_assert(CONSUMERS == 2 && BLOCK_ROWS == 64 && BLOCK_N == 64);
  static_assert(COLUMNS % Tile::COLUMNS == 0 && HEAD_DIM % Tile::COLUMNS == 0);
  static_assert(LATENT_SOFTMAX_BLOCKS == GROUP_BLOCKS, "O of a group stays in registers");

  // Groups of panels in the order in which they become free: the columns that are no values, which
  // S alone reads, then those of each consumer.
  static constexpr int GROUPS = 1 + CONSUMERS;
  __host__ __device__ static constexpr PanelGroup keys_alone() {
    return {0, V_PANELS, PANELS - V_PANELS};
  }
  __host__ __device__ static constexpr PanelGroup values_of(int part) {
    return {1 + part, part * OWN_PANELS, OWN_PANELS};
  }

  // From the first consumer, which has S, to the second. A thread writes for the thread with the
  // same rows.
  struct Exchange {
    uint4 weights[BLOCK_N / 16][WARPGROUP];  // A operands
    float4 stats[WARPGROUP];                 // of its two rows: top, sum of the lane's columns
  };
  struct Smem {
    alignas(1024) uint8_t k[STAGES][PANELS * Tile::BYTES];
    alignas(1024) uint8_t q[PANELS * Tile::BYTES];
    Exchange exchange;
    uint64_t k_full[STAGES][PANELS], k_empty[STAGES][GROUPS];
    uint64_t q_full, q_empty;
    typename Splits::Smem counting;
    Splits splits;                     // the members that all threads have in common
    int2 bounds;                       // of the split
    DecodeCursor key_blocks[CURSORS];  // of the last key blocks loaded
    __device__ Smem() = delete;        // laid over shared memory, never made

    // Called by one thread.
    __device__ __forceinline__ void make_barriers() {
      for (int stage = 0; stage < STAGES; ++stage) {
        for (uint64_t& full : k_full[stage]) mbarrier_init(shared_address(&full), 1);
        for (uint64_t& empty : k_empty[stage]) {
          mbarrier_init(shared_address(&empty), WARPS_OF_GROUP);
        }
      }
      mbarrier_init(shared_address(&q_full), QUERY_LOADERS);
      mbarrier_init(shared_address(&q_empty), WARPS_OF_GROUP);
      mbarriers_made();
    }
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

}  // namespace flash_dist

// Tiles, threads and shared memory of the multi-row decode kernel on Hopper.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/panels.cuh"
#include "decode_plans.h"
#include "plans.h"
#include "sm90/stages.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DecodeWideSm90Config
    : Config<DecodeWideSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = DecodeWideSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int LOADERS = WARPGROUP;  // loading threads, the last ones of the block
  static constexpr int CONSUMER_THREADS = THREADS - LOADERS;
  static constexpr int CONSUMERS = CONSUMER_THREADS / WARPGROUP;
  static constexpr int CONSUMER_ROWS = 64;
  static constexpr int BLOCK_ROWS = CONSUMERS * CONSUMER_ROWS;
  static constexpr int LARGER = Plan::LARGER;
  static constexpr int BLOCK_N = KEY_BLOCK;  // keys per tile of K or V
  static constexpr int TILES = 1;            // tiles of K, and of V, per key block
  static constexpr int PIECE = 64;           // columns of O per product
  static constexpr int PIECES = HEAD_DIM_V / PIECE;
  static constexpr bool V_IN_K = false;
  static constexpr bool KEEPS_CURSORS = false;
  // P is summed in the same parts as in mma/decode/kernel.cuh: PARTS parts per SUMMED_KEYS keys.
  static constexpr int PARTS = 4;
  static constexpr int SUMMED_KEYS = DecodeWidePlan<HEAD_DIM, HEAD_DIM_V, 99>::BLOCK_N;
  // The loader needs registers for cursors and 64-bit addresses.
  static constexpr int LOADER_REGISTERS = 64;
  static constexpr int CONSUMER_REGISTERS =
      registers_left(CONSUMERS, Plan::MIN_BLOCKS, LOADER_REGISTERS);
  using Splits = DecodeSplits<THREADS>;
  using KTile = Panels<BLOCK_N>;        // layout of a tile of K or V
  using QTile = Panels<CONSUMER_ROWS>;  // layout of a consumer's Q
  static_assert(HEAD_DIM == HEAD_DIM_V && HEAD_DIM % QTile::COLUMNS == 0);
  static_assert(BLOCK_ROWS == CONSUMER_ROWS || LARGER == 0);

  // Location of each 16-byte chunk of K or V in a tile.
  struct Layout {
    static constexpr int CHUNKS = HEAD_DIM / 8;
    static constexpr int ROW_BYTES = KTile::ROW_BYTES;
    __device__ __forceinline__ static int offset(int row, int chunk) {
      return KTile::offset(row, chunk);
    }
  };

  struct Smem {
    alignas(1024) uint16_t ring[Plan::STAGES][BLOCK_N * HEAD_DIM];  // tiles of K and V, alternating
    alignas(1024) uint16_t q[CONSUMERS][CONSUMER_ROWS * HEAD_DIM];
    // O per thread, top and sum per row, of the work tile while a group of keys is computed.
    float4 parked[HEAD_DIM_V / 8][CONSUMER_THREADS];
    float2 parked_stats[BLOCK_ROWS];
    StageBarriers<Plan::STAGES> barriers;
    typename Splits::Smem splits;
    Splits all;                                   // copy of the splits for the consumers
    DecodeCursor cursors[CONSUMER_THREADS / 32];  // one per warp
    SplitBounds bounds;
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert((SMEM_BYTES + 1024) * Plan::MIN_BLOCKS <= smem_plan_bytes(PLAN) + 1024);
};

}  // namespace flash_dist

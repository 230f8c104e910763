// Tiles, threads and shared memory of the kernel that reads a cache.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/tile.cuh"
#include "decode_plans.h"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DecodeConfig
    : Config<DecodePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = DecodePlan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int WARPS = Plan::WARPS;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int BLOCK_N = Plan::BLOCK_N;  // keys of a tile of K or V
  static constexpr int BLOCK_ROWS = TASK_ROWS;
  static constexpr int UNROLL = Target::UNROLL;
  static constexpr int TILES = UNIT_KEYS / BLOCK_N;      // of K, and of V, in a unit
  static constexpr int KEY_TILES = BLOCK_N / WARPS / 8;  // columns of S of a warp in a tile, by 8
  static_assert(HEAD_DIM == HEAD_DIM_V && BLOCK_N % (WARPS * 8) == 0);

  struct Smem {
    alignas(128) uint16_t ring[Plan::STAGES][BLOCK_N * HEAD_DIM];  // K and V in turn
    alignas(128) uint16_t q[TASK_ROWS * HEAD_DIM];
    alignas(128) uint16_t p[TASK_ROWS * UNIT_KEYS];
    float tops[WARPS][TASK_ROWS];  // of each warp's keys
    float sums[WARPS][TASK_ROWS];
    typename DecodeShares<THREADS>::Smem shares;
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

}  // namespace flash_dist

// Tiles, threads and shared memory of the fp32 forward kernel.
#pragma once

#include "core/config.h"
#include "f32/fwd/work.cuh"
#include "plans.h"

namespace flash_dist {

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct F32FwdTiles : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan::SPLIT, Plan::ROWS, Plan::WARPS, Plan::BLOCK_N;
  static constexpr int BLOCK_M = WARPS / SPLIT * ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = ROWS / 16;
  static constexpr int SLICE = HEAD_DIM / SPLIT;
  static_assert(HEAD_DIM == HEAD_DIM_V && WARPS % SPLIT == 0 && SLICE % 32 == 0);

  struct Smem {
    alignas(128) float q[BLOCK_M * HEAD_DIM];
    alignas(128) float k[BLOCK_N * HEAD_DIM];
    alignas(128) float v[BLOCK_N * HEAD_DIM];
    alignas(16) float exchange[SPLIT == 1 ? 4 : WARPS * ROWS * BLOCK_N];
    F32FwdWork<BLOCK_M, BLOCK_N> work;
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32FwdConfig =
    F32FwdTiles<F32FwdPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32FwdConfig =
    F32FwdTiles<Ieee32FwdPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

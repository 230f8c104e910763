// Tiles, threads and shared memory of the mma.sync forward kernel.
#pragma once

#include "core/config.h"
#include "mma/fwd/work.cuh"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdConfig : Config<FwdPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = FwdPlan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int BLOCK_M = Plan::WARPS * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = Plan::ROWS / 16;

  struct Smem {
    alignas(128) uint16_t q[BLOCK_M * HEAD_DIM];  // also the stage of the output
    alignas(128) uint16_t k[Plan::BLOCK_N * HEAD_DIM];
    alignas(128) uint16_t v[Plan::BLOCK_N * HEAD_DIM_V];
    FwdWork<BLOCK_M, Plan::BLOCK_N> work;
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  // Whether FwdWork is read from shared memory, as the accumulators need its registers. At head_dim 64
  // registers are 5 % faster on an H200.
  static constexpr bool SHARES_WORK =
      HEAD_DIM > 64 || !Target::HAS_CP_ASYNC || Target::NUMBER >= 100;
  static constexpr int UNROLL = STEPS_AHEAD<Target>;
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

}  // namespace flash_dist

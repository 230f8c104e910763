// Tiles, threads and shared memory of the forward kernel.
#pragma once

#include "core/target.h"
#include "plans.h"

namespace flash_dist {

template <class Target_, class T_, int HEAD_DIM_, int PLAN_>
struct FwdConfig : FwdPlan<HEAD_DIM_, PLAN_> {
  using Plan = FwdPlan<HEAD_DIM_, PLAN_>;
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int BLOCK_M = Plan::WARPS * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = Plan::ROWS / 16;

  struct Smem {
    alignas(128) uint16_t q[BLOCK_M * HEAD_DIM];  // also the stage of the output
    alignas(128) uint16_t k[Plan::BLOCK_N * HEAD_DIM];
    alignas(128) uint16_t v[Plan::BLOCK_N * HEAD_DIM];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN_));
};

}  // namespace flash_dist

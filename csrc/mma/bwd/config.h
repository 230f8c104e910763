// Tiles, threads and shared memory of the backward kernels.
#pragma once

#include "core/ds_layout.h"
#include "core/target.h"
#include "plans.h"

namespace flash_dist {

template <class Target_, class T_, int HEAD_DIM_, int PLAN_>
struct DkdvConfig : DkdvPlan<HEAD_DIM_, PLAN_> {
  using Plan = DkdvPlan<HEAD_DIM_, PLAN_>;
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int BLOCK_N = Plan::WARPS * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_N;
  static constexpr int ROW_TILES = Plan::ROWS / 16;
  // Whole products in one piece where the registers suffice: 5 % at head_dim 128 on an H200.
  static constexpr bool WHOLE = Target::HAS_CP_ASYNC && HEAD_DIM == 128;
  static constexpr int UNROLL_S = WHOLE ? 8 : Target::UNROLL;
  static constexpr int UNROLL_DP = WHOLE ? 8 : 2;
  static_assert(Plan::BLOCK_M % Plan::SUB_M == 0 && DS_TILE % Plan::BLOCK_M == 0 &&
                DS_TILE % Plan::ROWS == 0);

  struct Stage {
    alignas(128) uint16_t q[Plan::BLOCK_M * HEAD_DIM];
    alignas(128) uint16_t dout[Plan::BLOCK_M * HEAD_DIM];
    alignas(16) float lse_log2[Plan::BLOCK_M];
    float delta[Plan::BLOCK_M];  // right behind lse_log2
  };
  struct Smem {
    alignas(128) uint16_t k[BLOCK_N * HEAD_DIM];  // later the stage of dK
    alignas(128) uint16_t v[BLOCK_N * HEAD_DIM];  // later the stage of dV
    Stage stage[Plan::STAGES];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN_));
};

template <class Target_, class T_, int HEAD_DIM_, int PLAN_>
struct DqGemmConfig : DqGemmPlan<HEAD_DIM_, PLAN_> {
  using Plan = DqGemmPlan<HEAD_DIM_, PLAN_>;
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int BLOCK_M = Plan::WARPS * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = Plan::ROWS / 16;
  static constexpr int DS_TILES = BLOCK_M / DS_TILE;
  static_assert(Plan::STAGES >= 2 && BLOCK_M % DS_TILE == 0);

  struct Stage {
    alignas(128) uint16_t k[DS_TILE * HEAD_DIM];
    alignas(128) uint16_t ds[BLOCK_M * DS_TILE];
  };
  struct Smem {
    Stage stage[Plan::STAGES];  // later the stage of dQ
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN_) && SMEM_BYTES >= BLOCK_M * HEAD_DIM * 2);
};

template <class Target_, class T_, int HEAD_DIM_, int PLAN_>
struct DqRecomputeConfig : DqRecomputePlan<HEAD_DIM_, PLAN_> {
  using Plan = DqRecomputePlan<HEAD_DIM_, PLAN_>;
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int BLOCK_M = Plan::WARPS * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = Plan::ROWS / 16;
  static constexpr int SUB_N = 32;  // keys per pass: bounds the registers of S and dP
  static_assert(Plan::BLOCK_N % SUB_N == 0);

  struct Stage {
    alignas(128) uint16_t k[Plan::BLOCK_N * HEAD_DIM];
    alignas(128) uint16_t v[Plan::BLOCK_N * HEAD_DIM];
  };
  struct Smem {
    alignas(128) uint16_t q[BLOCK_M * HEAD_DIM];  // later the stage of dQ
    alignas(128) uint16_t dout[BLOCK_M * HEAD_DIM];
    Stage stage[Plan::STAGES];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN_));
};

}  // namespace flash_dist

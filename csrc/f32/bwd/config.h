// Tiles, threads and shared memory of the fp32 backward kernels.
#pragma once

#include "core/config.h"
#include "f32/bwd/work.cuh"
#include "plans.h"

namespace flash_dist {

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct F32DkdvTiles : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan::SPLIT, Plan::WARPS, Plan::BLOCK_M;
  static constexpr int ROWS = 16;  // keys of a warp
  static constexpr int BLOCK_N = WARPS / SPLIT * ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_N;
  static constexpr int SLICE = HEAD_DIM / SPLIT;
  static constexpr int UNROLL = SLICE > 64 ? 2 : STEPS_AHEAD<Target>;
  static_assert(HEAD_DIM == HEAD_DIM_V && WARPS % SPLIT == 0 && SLICE % 32 == 0);
  static_assert(MASK_TILE % BLOCK_M == 0);
  static_assert(Plan::STAGES <= 2, "an item is read one barrier after it was written");

  struct Stage {
    alignas(128) float q[BLOCK_M * HEAD_DIM];
    alignas(128) float dout[BLOCK_M * HEAD_DIM];
    alignas(16) float lse_log2[BLOCK_M];
    float delta[BLOCK_M];        // right behind lse_log2
    float normalizers[BLOCK_M];  // right behind delta
  };
  // Item i is at i % ITEMS from one fetch before its own on, until two fetches later.
  static constexpr int ITEMS = 4;
  struct Smem {
    alignas(128) float k[BLOCK_N * HEAD_DIM];
    alignas(128) float v[BLOCK_N * HEAD_DIM];
    Stage stage[Plan::STAGES];
    alignas(16) float exchange[SPLIT == 1 ? 4 : WARPS * ROWS * BLOCK_M];
    F32DkdvWork work;
    F32DkdvCursor<BLOCK_M, BLOCK_N> cursor;  // thread 0's, here to leave registers to dK and dV
    F32DkdvItem items[ITEMS];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32DkdvConfig =
    F32DkdvTiles<F32DkdvPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32DkdvConfig =
    F32DkdvTiles<Ieee32DkdvPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct F32DqRecomputeTiles : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan::SPLIT, Plan::WARPS, Plan::BLOCK_N;
  static constexpr int ROWS = 16;  // queries of a warp
  static constexpr int BLOCK_M = WARPS / SPLIT * ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int SLICE = HEAD_DIM / SPLIT;
  static constexpr int UNROLL = SLICE > 64 ? 2 : STEPS_AHEAD<Target>;
  static_assert(HEAD_DIM == HEAD_DIM_V && WARPS % SPLIT == 0 && SLICE % 32 == 0);

  struct Stage {
    alignas(128) float k[BLOCK_N * HEAD_DIM];
    alignas(128) float v[BLOCK_N * HEAD_DIM];
  };
  struct Smem {
    alignas(128) float q[BLOCK_M * HEAD_DIM];
    alignas(128) float dout[BLOCK_M * HEAD_DIM];
    Stage stage[Plan::STAGES];
    alignas(16) float exchange[SPLIT == 1 ? 4 : WARPS * ROWS * BLOCK_N];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32DqRecomputeConfig = F32DqRecomputeTiles<F32DqRecomputePlan<HEAD_DIM, HEAD_DIM_V, PLAN>,
                                                 Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32DqRecomputeConfig =
    F32DqRecomputeTiles<Ieee32DqRecomputePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

// Tiles, threads and shared memory of the mma.sync backward kernels.
#pragma once

#include <type_traits>

#include "core/config.h"
#include "core/dkdv_items.cuh"
#include "core/ds_layout.h"
#include "core/tile.cuh"
#include "plans.h"

namespace flash_dist {

// True if dK/dV blocks may have fewer keys than a dS tile. The blocks may then store only part of
// the dS tiles of the last key tile.
template <int HEAD_DIM>
constexpr bool PARTLY_STORED = HEAD_DIM > 128;

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool DROPS_ = false>
struct DkdvConfigOf : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr bool DROPS = DROPS_;
  using Plan::BLOCK_M, Plan::SPLIT, Plan::SUB_M, Plan::ROWS;
  // SPLIT warps share their keys. Each warp owns every SPLIT-th block of 16 columns of dK and dV.
  // Each computes S^T and dP^T for part of the queries, and the warps exchange the results.
  static constexpr int BLOCK_N = Plan::WARPS / SPLIT * ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_N;
  static constexpr int ROW_TILES = ROWS / 16;
  static constexpr int QUERIES = SUB_M / SPLIT;  // columns of a warp's S^T
  // True if matrix products are unrolled fully: 5 % faster on an H200 at head_dim 128. At head_dim
  // 64, full unrolling would spill 8 to 20 bytes.
  static constexpr bool WHOLE = Target::HAS_CP_ASYNC && HEAD_DIM == 128 && !DROPS;
  static constexpr int UNROLL_S = WHOLE ? 8 : DROPS ? 2 : STEPS_AHEAD<Target>;
  static constexpr int UNROLL_DP = WHOLE ? 8 : 2;
  static_assert(BLOCK_N % DS_TILE == 0 || PARTLY_STORED<HEAD_DIM>);
  static_assert(BLOCK_M % SUB_M == 0 && DS_TILE % BLOCK_M == 0 && DS_TILE % ROWS == 0);
  static_assert(SPLIT == 1 || SUB_M == BLOCK_M, "the exchanged tile is that of a whole stage");

  struct Stage {
    alignas(128) uint16_t q[BLOCK_M * HEAD_DIM];
    alignas(128) uint16_t dout[BLOCK_M * HEAD_DIM_V];
    alignas(16) float lse_log2[BLOCK_M];
    float delta[BLOCK_M];  // must follow lse_log2
    DkdvItem item;
  };
  struct Smem {
    alignas(128) uint16_t k[BLOCK_N * HEAD_DIM];    // reused to stage dK
    alignas(128) uint16_t v[BLOCK_N * HEAD_DIM_V];  // reused to stage dV
    Stage stage[Plan::STAGES];
    alignas(16) uint16_t p[SPLIT == 1 ? 8 : BLOCK_N * BLOCK_M];   // exchanged as A fragments
    alignas(16) uint16_t ds[SPLIT == 1 ? 8 : BLOCK_N * BLOCK_M];  // exchanged like p
    DkdvWork work;
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DkdvConfig =
    DkdvConfigOf<DkdvPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

// Configuration of the kernel that computes dQ, dK and dV of short sequences, which fit into one
// tile.
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct WholeConfig
    : Config<WholePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = WholePlan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int TILE = Plan::WARPS * 16;  // largest number of queries and of keys
  static constexpr int BLOCK_ROWS = TILE;
  static constexpr int UNROLL = STEPS_AHEAD<Target>;
  static_assert(TILE == MASK_TILE && TILE % Plan::SUB_M == 0);

  struct Smem {
    alignas(128) uint16_t k[TILE * HEAD_DIM];    // reused to stage dK
    alignas(128) uint16_t v[TILE * HEAD_DIM_V];  // reused to stage dV
    alignas(128) uint16_t q[TILE * HEAD_DIM];    // reused to stage dQ
    alignas(128) uint16_t dout[TILE * HEAD_DIM_V];
    alignas(128) uint16_t ds[TILE * TILE];  // dS^T: one row per key
    alignas(16) float lse_log2[TILE];
    float delta[TILE];  // must follow lse_log2
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DqGemmConfig
    : Config<DqGemmPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = DqGemmPlan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  using Plan::SPLIT;  // warps that share queries; each owns every SPLIT-th block of 16 columns
  static constexpr int BLOCK_M = Plan::WARPS / SPLIT * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = Plan::ROWS / 16;
  static constexpr int DS_TILES = BLOCK_M / DS_TILE;
  static_assert(BLOCK_M % DS_TILE == 0 && DS_TILES <= 2);

  struct Stage {
    alignas(128) uint16_t k[DS_TILE * HEAD_DIM];
    alignas(128) uint16_t ds[BLOCK_M * DS_TILE];
  };
  struct Smem {
    Stage stage[Plan::STAGES];  // reused to stage dQ
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN) && SMEM_BYTES >= BLOCK_M * HEAD_DIM * 2);
};

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool DROPS_ = false>
struct DqRecomputeConfigOf : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr bool DROPS = DROPS_;
  // SPLIT warps share their queries. Each computes dS for part of the keys, and owns every SPLIT-th
  // block of 16 columns of dQ.
  using Plan::SPLIT;
  static constexpr int BLOCK_M = Plan::WARPS / SPLIT * Plan::ROWS;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int ROW_TILES = Plan::ROWS / 16;
  // Keys of a warp per pass: limits the registers of S and dP.
  static constexpr int SUB_N = SPLIT > 1            ? Plan::BLOCK_N / SPLIT
                               : Plan::BLOCK_N < 32 ? Plan::BLOCK_N
                                                    : 32;
  static constexpr int UNROLL =
      LOADS_LATE<Target, HEAD_DIM> ? 1 : (ROW_TILES == 2 ? 2 : STEPS_AHEAD<Target>);
  static_assert(Plan::BLOCK_N % SUB_N == 0);

  struct Stage {
    alignas(128) uint16_t k[Plan::BLOCK_N * HEAD_DIM];
    alignas(128) uint16_t v[Plan::BLOCK_N * HEAD_DIM_V];
  };
  struct NoExchange {};
  struct DsExchange {
    alignas(16) uint16_t ds[BLOCK_M * Plan::BLOCK_N];  // stored as A fragments
  };
  struct Smem {
    alignas(128) uint16_t q[BLOCK_M * HEAD_DIM];  // reused to stage dQ
    alignas(128) uint16_t dout[BLOCK_M * HEAD_DIM_V];
    Stage stage[Plan::STAGES];
    std::conditional_t<SPLIT == 1, NoExchange, DsExchange> exchange;
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DqRecomputeConfig = DqRecomputeConfigOf<DqRecomputePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target,
                                              T, HEAD_DIM, HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

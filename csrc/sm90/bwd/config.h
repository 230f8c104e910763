// Tiles, threads and shared memory of the backward kernels for Hopper.
#pragma once

#include <type_traits>

#include "core/config.h"
#include "core/ds_layout.h"
#include "core/maps.h"
#include "core/panels.cuh"
#include "plans.h"
#include "sm90/bwd/work.cuh"
#include "sm90/score_mod.cuh"
#include "sm90/stages.cuh"

namespace flash_dist {

struct DkdvSm90Params {
  alignas(128) CUtensorMap q, k, v, dout;
  AxisSteps q_axes, k_axes, v_axes, dout_axes;
  BwdParams p;
};

struct DkdvScoredSm90Params : DkdvSm90Params {
  ScoreModParams score_mod;
};

struct DkdvDropoutSm90Params : DkdvSm90Params {
  DropoutParams dropout;
};

struct DkdvBiasSm90Params : DkdvSm90Params {
  alignas(128) CUtensorMap bias;
  AxisSteps bias_axes;
  int bias_rows;  // rows of a box: BLOCK_M, or 1 if all queries share one row
};

struct DqSm90Params {
  alignas(128) CUtensorMap k;
  AxisSteps k_axes;
  BwdParams p;
};

// How a kernel reads a bias: in boxes by TMA (BOXES; the fused kernel needs FP32_BOXES for fp32),
// or with loads from global memory (ELEMENTS).
enum class BiasLoads { NONE, BOXES, FP32_BOXES, ELEMENTS };

// The configuration of a plan from kernels.toml. PLAN: the plan's entry in smem_plans.
// HAS_SCORE_MOD: the kernel serves calls with a soft cap or ALiBi.
template <class Plan_, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool HAS_SCORE_MOD_>
struct DkdvSm90ConfigOf : Config<Plan_, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = Plan_;
  static constexpr bool HAS_SCORE_MOD = HAS_SCORE_MOD_;
  static constexpr bool BIAS_IN_BOXES = false;
  using Params = std::conditional_t<HAS_SCORE_MOD, DkdvScoredSm90Params, DkdvSm90Params>;
  static constexpr int CONSUMERS = Plan::WARPS / 4 - 1;  // warpgroups with 64 keys each
  static constexpr int BLOCK_M = MASK_TILE;              // queries per stage
  static constexpr int BLOCK_N = CONSUMERS * 64;
  static constexpr int BLOCK_ROWS = BLOCK_N;
  static constexpr int CLUSTER = Plan::CLUSTER;  // number of blocks that share a key tile: 1 or 2
  // Registers per thread of each role, for setmaxnreg. All roles together must not use more
  // registers than the block has at launch.
  static constexpr int LOADER_REGISTERS = 24;
  static constexpr int CONSUMER_REGISTERS = 240;
  static_assert(has_registers(CONSUMERS, LOADER_REGISTERS, CONSUMER_REGISTERS));
  static_assert(CONSUMERS == 2, "two halves of a list's entries, and of the registers");

  // 2 if a warpgroup has registers for S^T and dP^T in addition to dK and dV, else 1.
  static constexpr int SCORES_AT_A_TIME = HAS_SCORE_MOD && HEAD_DIM > 96 ? 1 : 2;

  using KTile = Panels<BLOCK_N>;
  using QTile = Panels<BLOCK_M>;
  static constexpr int PANELS = KTile::count(HEAD_DIM);
  static constexpr int V_PANELS = KTile::count(HEAD_DIM_V);

  struct Stage {
    alignas(1024) uint8_t q[PANELS * QTile::BYTES];
    alignas(1024) uint8_t dout[V_PANELS * QTile::BYTES];
  };
  struct SmemOfOne {
    alignas(1024) uint8_t k[PANELS * KTile::BYTES];    // reused to stage dK
    alignas(1024) uint8_t v[V_PANELS * KTile::BYTES];  // reused to stage dV
    Stage stage[Plan::STAGES];
    alignas(16) float lse_log2[Plan::STAGES][BLOCK_M];
    alignas(16) float delta[Plan::STAGES][BLOCK_M];
    DkdvItem item[Plan::STAGES];
    DkdvSm90Work work;
    uint64_t keys_full;
    StageBarriers<Plan::STAGES> barriers;
    __device__ SmemOfOne() = delete;  // overlaid on shared memory, never constructed
  };

  // Both blocks of a pair have this layout, but only the second block receives P^T in its slots.
  static constexpr int SLOTS = 2;
  static constexpr int WARPS_THAT_COMPUTE = CONSUMERS * WARPS_OF_GROUP;
  static constexpr int WARP_SLOT_BYTES = 16 * BLOCK_M * 2;
  struct Exchange {
    alignas(128) uint8_t probabilities[SLOTS][WARPS_THAT_COMPUTE][WARP_SLOT_BYTES];
    uint64_t full[SLOTS][WARPS_THAT_COMPUTE];   // barriers that only the second block uses
    uint64_t empty[SLOTS][WARPS_THAT_COMPUTE];  // barriers that only the first block uses
  };
  struct SmemOfPair {
    alignas(1024) uint8_t keys[PANELS * KTile::BYTES];  // K or V; reused to stage dV or dK
    Stage stage[Plan::STAGES];
    Exchange exchange;
    alignas(16) float statistics[Plan::STAGES][BLOCK_M];  // lse in base 2, or delta
    DkdvItem item[2 * Plan::STAGES];
    DkdvSm90Work work;
    uint64_t keys_full;
    StageBarriers<Plan::STAGES> first, second;  // for operands of the first and second product
    __device__ SmemOfPair() = delete;           // overlaid on shared memory, never constructed
  };
  using Smem = std::conditional_t<CLUSTER == 1, SmemOfOne, SmemOfPair>;
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DkdvSm90Config : DkdvSm90ConfigOf<DkdvSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                         HEAD_DIM, HEAD_DIM_V, PLAN, false> {};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DkdvScoredSm90Config : DkdvSm90ConfigOf<DkdvScoredSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>,
                                               Target, T, HEAD_DIM, HEAD_DIM_V, PLAN, true> {};

// The configuration of the dQ kernel. CLUSTER_: number of blocks with the same queries; each block
// computes some columns of dQ.
template <class Plan_, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          int CLUSTER_ = 1>
struct DqGemmSm90ConfigOf : Config<Plan_, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = Plan_;
  static constexpr int CLUSTER = CLUSTER_;
  static constexpr int COLUMNS = HEAD_DIM / CLUSTER;     // columns of dQ per block
  static constexpr int CONSUMERS = Plan::WARPS / 4 - 1;  // warpgroups with 64 queries each
  static constexpr int BLOCK_M = CONSUMERS * DS_TILE;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int LOADER_REGISTERS = 40;
  static constexpr int CONSUMER_REGISTERS = 232;
  static_assert(has_registers(CONSUMERS, LOADER_REGISTERS, CONSUMER_REGISTERS));
  static_assert(CONSUMERS == 2, "two halves of a list's entries, and of the registers");

  using Tile = Panels<DS_TILE>;  // a tile of K; at the end, dQ of a warpgroup's queries
  static constexpr int PANELS = Tile::count(COLUMNS);
  static constexpr int TILE_BYTES = PANELS * Tile::BYTES;
  static_assert(Plan::STAGES >= CONSUMERS, "the stages of K become those of dQ");

  struct Smem {
    alignas(1024) uint8_t k[Plan::STAGES][TILE_BYTES];  // reused to stage dQ
    alignas(128) uint8_t ds[Plan::STAGES][CONSUMERS][DS_TILE_BYTES];
    DqSm90Item item[Plan::STAGES];
    DqSm90Work<BLOCK_M> work;
    StageBarriers<Plan::STAGES> barriers;
    __device__ Smem() = delete;  // overlaid on shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DqGemmSm90Config : DqGemmSm90ConfigOf<DqGemmSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                             HEAD_DIM, HEAD_DIM_V, PLAN> {};

}  // namespace flash_dist

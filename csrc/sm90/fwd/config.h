// Tiles, threads and shared memory of the forward kernel for Hopper.
#pragma once

#include <type_traits>

#include "core/config.h"
#include "core/maps.h"
#include "core/panels.cuh"
#include "plans.h"
#include "sm90/fwd/work.cuh"
#include "sm90/score_mod.cuh"
#include "sm90/stages.cuh"

namespace flash_dist {

// Memory in which a tile of out is staged. OWN: its own. QUERIES: that of Q, which is released
// after the store. NONE: registers are stored directly to global memory.
enum class OutStage { OWN, QUERIES, NONE };

struct FwdSm90Params {
  alignas(128) CUtensorMap q, k, v, out;
  AxisSteps q_axes, k_axes, v_axes;
  int tiles;          // query tiles of all heads and batch entries
  unsigned* tickets;  // counts the tiles taken after each block's first one; null: static order
  FwdParams p;
};

struct FwdScoredSm90Params : FwdSm90Params {
  FwdScoreModParams score_mod;
};

struct FwdDropoutSm90Params : FwdSm90Params {
  DropoutParams dropout;
};

struct FwdBiasSm90Params : FwdSm90Params {
  alignas(128) CUtensorMap bias;
  AxisSteps bias_axes;
  int bias_rows;       // rows of a box: BLOCK_M, or 1 if all queries share one row
  bool bias_in_boxes;  // false: no tensor map describes the bias, and `bias` is not set
};

// NOTE: a derived struct, so that the configuration follows from the type of the parameters.
struct FwdFp32BiasSm90Params : FwdBiasSm90Params {};

struct FwdMaxLogitSm90Params : FwdSm90Params {
  float* max_logit;  // see MaxLogitParams
};

// The number of bias stages in shared memory (sm90/fwd/bias.cuh).
template <class Plan, bool HAS_BIAS>
constexpr int bias_stages() {
  if constexpr (HAS_BIAS) return Plan::BIAS_STAGES;
  return 0;
}

// The configuration of a plan from kernels.toml. PLAN: the plan's entry in smem_plans. Params_
// selects the variant of the kernel.
template <class Plan_, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN, class Params_>
struct FwdSm90ConfigOf : Config<Plan_, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = Plan_;
  using Params = Params_;
  static constexpr bool HAS_SCORE_MOD = std::is_same_v<Params, FwdScoredSm90Params>;
  static constexpr bool DROPS = std::is_same_v<Params, FwdDropoutSm90Params>;
  static constexpr bool HAS_BIAS = std::is_base_of_v<FwdBiasSm90Params, Params>;
  static constexpr bool BIAS_IS_FP32 = std::is_same_v<Params, FwdFp32BiasSm90Params>;
  // Number of warps that load only a bias in boxes, with one thread each. If the thread that loads
  // K and V also loaded an fp32 bias, waiting for stages of the bias would delay K and V.
  static constexpr int BIAS_LOADERS = BIAS_IS_FP32 ? 1 : 0;
  static constexpr bool FINDS_MAX_LOGIT = std::is_same_v<Params, FwdMaxLogitSm90Params>;
  static constexpr int BIAS_STAGES = bias_stages<Plan, HAS_BIAS>();
  // The number of warpgroups with 64 queries each. One more warpgroup loads, and another one copies
  // a bias that no tensor map describes.
  static constexpr int GROUPS = Plan::WARPS / WARPS_OF_GROUP;
  static constexpr int LOADING_GROUPS = HAS_BIAS ? 2 : 1;
  static constexpr int CONSUMERS = GROUPS - LOADING_GROUPS;
  static constexpr int BLOCK_M = CONSUMERS * 64;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr bool TAKES_TICKETS = true;
  static constexpr bool IS_SMALL = Plan::LARGER > 0;
  static constexpr int LONGEST_N = Plan::BLOCK_N > Plan::LIST_N ? Plan::BLOCK_N : Plan::LIST_N;
  // True if a step finds its mask before its scores are ready. This takes registers.
  static constexpr bool LOOKS_AHEAD = HEAD_DIM_V <= 192 && !HAS_SCORE_MOD && !HAS_BIAS && !DROPS;
  // True if each warpgroup skips the steps that are masked for all of its 64 queries. At larger
  // head_dims there are no registers for this.
  static constexpr bool SKIPS_STEPS =
      HEAD_DIM == 64 && HEAD_DIM_V == 64 && !HAS_SCORE_MOD && !HAS_BIAS;
  using Work = std::conditional_t<SKIPS_STEPS, FwdSm90SkippingWork<CONSUMERS>, FwdSm90Work>;
  // True if there is only one mainloop: lists are not served, or a step over a list has as many
  // keys as a step over a range.
  static constexpr bool ONE_MAINLOOP = Plan::LIST_N == 0 || Plan::LIST_N == Plan::BLOCK_N;
  // Registers per thread of each role, for setmaxnreg. The loader needs 32, or 40 with two
  // mainloops, or 48 to copy a bias by rows. With 24 the loader spills, but the accumulators then
  // have enough registers.
  static constexpr int LOADER_REGISTERS =
      HAS_BIAS                                                                  ? 48
      : CONSUMERS == 3                                                          ? 32
      : Plan::MIN_BLOCKS == 3                                                   ? 24
      : CONSUMERS == 2 && ONE_MAINLOOP && HEAD_DIM > (HAS_SCORE_MOD ? 128 : 96) ? 24
                                                                                : 40;
  static constexpr int CONSUMER_REGISTERS =
      HAS_BIAS
          ? (GROUPS * registers_at_launch(GROUPS * WARPGROUP) - LOADING_GROUPS * LOADER_REGISTERS) /
                CONSUMERS / 8 * 8
          : registers_left(CONSUMERS, Plan::MIN_BLOCKS, LOADER_REGISTERS);

  using QPanels = Panels<BLOCK_M>;
  static constexpr int Q_PANELS = QPanels::count(HEAD_DIM);
  static constexpr int V_PANELS = QPanels::count(HEAD_DIM_V);
  template <int BLOCK_N>
  static constexpr int K_BYTES = Q_PANELS * Panels<BLOCK_N>::BYTES;
  template <int BLOCK_N>
  static constexpr int V_BYTES = V_PANELS * Panels<BLOCK_N>::BYTES;

  static constexpr int OUT_BYTES = V_PANELS * QPanels::BYTES;
  static constexpr int BIAS_BYTES = 2 * QPanels::BYTES;  // bytes per stage
  static constexpr int TILE_BYTES =
      Q_PANELS * QPanels::BYTES +
      Plan::STAGES * (K_BYTES<LONGEST_N> + V_BYTES<LONGEST_N>)+BIAS_STAGES * BIAS_BYTES;
  static constexpr OutStage OUT_STAGE =
      TILE_BYTES + OUT_BYTES + 1024 <= smem_plan_bytes(PLAN) ? OutStage::OWN : OutStage::NONE;
  // Two stages of Q if they fit: the next Q then arrives while the current one is read.
  static constexpr int Q_BYTES = Q_PANELS * QPanels::BYTES;
  static constexpr int Q_STAGES = TILE_BYTES + OUT_BYTES + Q_BYTES + 2048 > smem_plan_bytes(PLAN)
                                      ? 1
                                      : 2;

  struct Smem {
    alignas(1024) uint8_t q[Q_STAGES][Q_BYTES];
    uint8_t out[OUT_STAGE == OutStage::OWN ? OUT_BYTES : 0];  // its size is a multiple of 1024
    alignas(1024) uint8_t k[Plan::STAGES][K_BYTES<LONGEST_N>];
    alignas(1024) uint8_t v[Plan::STAGES][V_BYTES<LONGEST_N>];
    uint8_t bias[BIAS_STAGES][BIAS_BYTES];
    Work work[WORKS];
    FwdSm90Progress progress;
    StageBarriers<WORKS> work_barriers;
    StageBarriers<Q_STAGES> q_barriers;
    StageBarriers<Plan::STAGES> k_barriers, v_barriers;
    StageBarriers<BIAS_STAGES> bias_barriers;
    __device__ Smem() = delete;  // overlaid on shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert((SMEM_BYTES + 1024) * Plan::MIN_BLOCKS <= smem_plan_bytes(PLAN) + 1024);
  static_assert(Plan::LIST_N == 0 || BLOCK_M == 128, "lists are made for 64 and 128 queries");
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdSm90Config : FwdSm90ConfigOf<FwdSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                                       HEAD_DIM_V, PLAN, FwdSm90Params> {};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdScoredSm90Config : FwdSm90ConfigOf<FwdScoredSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target,
                                             T, HEAD_DIM, HEAD_DIM_V, PLAN, FwdScoredSm90Params> {};

}  // namespace flash_dist

// Tiles, threads and shared memory of the forward kernel for Hopper.
#pragma once

#include "core/config.h"
#include "core/maps.h"
#include "core/panels.cuh"
#include "plans.h"
#include "sm90/fwd/work.cuh"
#include "sm90/stages.cuh"

namespace flash_dist {

struct FwdSm90Params {
  alignas(128) CUtensorMap q, k, v, out;
  AxisSteps q_axes, k_axes, v_axes;
  int tiles;          // of queries, of all heads and batch entries
  unsigned* tickets;  // tiles taken beyond the first of each block; null: each takes every n-th
  FwdParams p;
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdSm90Config
    : Config<FwdSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = FwdSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int CONSUMERS = Plan::WARPS / 4 - 1;  // warpgroups of 64 queries; one loads
  static constexpr int BLOCK_M = CONSUMERS * 64;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr bool TAKES_TICKETS = true;
  static constexpr int LONGEST_N = Plan::BLOCK_N > Plan::LIST_N ? Plan::BLOCK_N : Plan::LIST_N;
  // Whether lists are walked in steps of as many keys, by the same code.
  static constexpr bool ONE_WALK = Plan::LIST_N == 0 || Plan::LIST_N == Plan::BLOCK_N;
  // setmaxnreg: what a block has at its launch, 168 or 128 registers a thread, for each role. A
  // loader of two walks needs more than 24.
  static constexpr int LOADER_REGISTERS = CONSUMERS == 3 ? 32 : ONE_WALK ? 24 : 40;
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : ONE_WALK ? 240 : 232;
  static_assert(has_registers(CONSUMERS, LOADER_REGISTERS, CONSUMER_REGISTERS));

  using QPanels = Panels<BLOCK_M>;
  static constexpr int Q_PANELS = QPanels::count(HEAD_DIM);
  static constexpr int V_PANELS = QPanels::count(HEAD_DIM_V);
  template <int BLOCK_N>
  static constexpr int K_BYTES = Q_PANELS * Panels<BLOCK_N>::BYTES;
  template <int BLOCK_N>
  static constexpr int V_BYTES = V_PANELS * Panels<BLOCK_N>::BYTES;

  // Whether Q's place is the stage of the output, too: the next Q is then loaded after the store.
  static constexpr int OUT_BYTES = V_PANELS * QPanels::BYTES;
  static constexpr int TILE_BYTES =
      Q_PANELS * QPanels::BYTES + Plan::STAGES * (K_BYTES<LONGEST_N> + V_BYTES<LONGEST_N>);
  static constexpr bool SHARES_Q = TILE_BYTES + OUT_BYTES + 1024 > smem_plan_bytes(PLAN);

  struct Smem {
    alignas(1024) uint8_t q[Q_PANELS * QPanels::BYTES];
    uint8_t out[SHARES_Q ? 0 : OUT_BYTES];  // a multiple of 1024
    alignas(1024) uint8_t k[Plan::STAGES][K_BYTES<LONGEST_N>];
    alignas(1024) uint8_t v[Plan::STAGES][V_BYTES<LONGEST_N>];
    FwdSm90Work work[2];
    FwdSm90Progress progress;
    StageBarriers<2> work_barriers;
    StageBarriers<1> q_barriers;
    StageBarriers<Plan::STAGES> k_barriers, v_barriers;
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
  static_assert(Plan::LIST_N == 0 || BLOCK_M == 128, "lists are made for 64 and 128 queries");
  static_assert(!SHARES_Q || V_PANELS <= Q_PANELS, "Q's place holds the output");
};

}  // namespace flash_dist

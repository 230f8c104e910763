// Tiles, threads and shared memory of the forward kernel for Hopper in which two blocks share the
// queries.
#pragma once

#include "core/config.h"
#include "core/panels.cuh"
#include "fwd_pair_plans.h"
#include "plans.h"
#include "sm90/fwd/config.h"
#include "sm90/fwd/work.cuh"
#include "sm90/stages.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdPairSm90Config
    : Config<FwdPairSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = FwdPairSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr bool HAS_SCORE_MOD = false;
  static constexpr int CLUSTER = 2;
  static constexpr int CONSUMERS = Plan::WARPS / 4 - 1;  // warpgroups with 64 queries each
  static constexpr int CONSUMER_WARPS = CONSUMERS * WARPS_OF_GROUP;
  static constexpr int BLOCK_M = CONSUMERS * 64;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int BLOCK_N = MASK_TILE;             // keys of a block's step
  static constexpr int COLUMNS = HEAD_DIM_V / CLUSTER;  // columns of out per block
  static constexpr int SLICE = Plan::SLICE;             // columns of K or V in a stage
  static constexpr int K_SLICES = HEAD_DIM / SLICE;     // slices of K per step
  static constexpr int V_SLICES = COLUMNS / SLICE;      // slices of V for a step's keys
  static constexpr int LOADER_REGISTERS = 24;           // for setmaxnreg
  static constexpr int CONSUMER_REGISTERS = registers_left(CONSUMERS, 1, LOADER_REGISTERS);
  static_assert(CONSUMERS == 2, "lists are made for 128 queries");

  using Work = FwdSm90Work;
  using Slices = SliceRing<Plan::STAGES>;
  using Steps = KeySteps<BLOCK_N, KeySource::BOTH>;
  using QTile = Panels<BLOCK_M>;
  using KTile = Panels<BLOCK_N>;
  static constexpr int Q_PANELS = QTile::count(HEAD_DIM);
  static constexpr int OUT_PANELS = QTile::count(COLUMNS);
  static constexpr int SLICE_PANELS = KTile::count(SLICE);
  static constexpr int SLICE_BYTES = SLICE_PANELS * KTile::BYTES;
  static_assert(SLICE % 64 == 0 && HEAD_DIM % SLICE == 0 && COLUMNS % SLICE == 0);
  // A warpgroup holds at most V_SLICES + 1 slices that it has not released: the V_SLICES slices of
  // V of one step, and one more slice of K or V.
  static_assert(Plan::STAGES > V_SLICES + 1, "a consumer would wait for what it does not release");

  // Data from the other block. Each warp receives it from the warp with the same queries.
  struct Exchange {
    alignas(128) uint4 weights[CONSUMER_WARPS][BLOCK_N / 16][32];  // A operands, by lanes
    float4 stats[CONSUMER_WARPS][8];  // two rows each: their maxima; at the end, their sums
    uint64_t weights_full[CONSUMER_WARPS], stats_full[CONSUMER_WARPS];
    static constexpr int WEIGHTS_BYTES = BLOCK_N / 16 * 32 * sizeof(uint4);  // per warp
    static constexpr int STATS_BYTES = 8 * sizeof(float4);
  };
  struct Smem {
    alignas(1024) uint8_t q[Q_PANELS * QTile::BYTES];  // reused to stage out
    alignas(1024) uint8_t slices[Plan::STAGES][SLICE_BYTES];
    Exchange exchange;
    Work work;
    uint64_t q_full[K_SLICES], full[Plan::STAGES], empty[Plan::STAGES];
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed

    // Initializes the barriers. Called by one thread.
    __device__ __forceinline__ void make_barriers() {
      for (uint64_t& one : q_full) mbarrier_init(shared_address(&one), 1);
      for (uint64_t& one : full) mbarrier_init(shared_address(&one), 1);
      for (uint64_t& one : empty) mbarrier_init(shared_address(&one), CONSUMER_WARPS);
      for (uint64_t& one : exchange.weights_full) mbarrier_init(shared_address(&one), 1);
      for (uint64_t& one : exchange.stats_full) mbarrier_init(shared_address(&one), 1);
      mbarriers_made();
    }
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

// The keys of a work tile in pairs of steps, from the last to the first. Each block computes one
// step of a pair. If the number of steps is odd, the last pair has only the step of block 0. Block
// 1 reads the same keys but masks all of them.
struct StepPairs {
  const KeyBounds& bounds;

  __device__ __forceinline__ int count() const { return (bounds.end - bounds.begin + 1) / 2; }
  __device__ __forceinline__ int step(int pair, int rank) const {
    return max(bounds.end - 1 - 2 * pair - rank, bounds.begin);
  }
  __device__ __forceinline__ bool lacks(int pair, int rank) const {
    return bounds.end - 1 - 2 * pair - rank < bounds.begin;
  }
};

}  // namespace flash_dist

// Tiles, threads and shared memory of the fused backward for Hopper.
#pragma once

#include "sm90/bwd/config.h"
#include "sm90/bwd_fused/work.cuh"

namespace flash_dist {

// Named barriers. ONE_CONSUMER + 2 is that of warpgroup 3. KEYS_CLEARED: K has zeros for missing
// keys. KEYS_READ: K and V may be overwritten. APART: see FusedSm90Keys::stagger().
enum KeyBarrier : int { KEYS_CLEARED = ONE_CONSUMER + 3, KEYS_READ, APART };

// The configuration of the fused kernel. The first parameters are those of DkdvSm90ConfigOf.
template <class Plan_, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool HAS_SCORE_MOD_, bool DROPS_ = false, BiasLoads BIAS_ = BiasLoads::NONE>
struct FusedSm90ConfigOf : Config<Plan_, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = Plan_;
  static constexpr bool HAS_SCORE_MOD = HAS_SCORE_MOD_;
  static constexpr bool DROPS = DROPS_;
  static constexpr BiasLoads BIAS = BIAS_;
  static constexpr bool HAS_BIAS = BIAS != BiasLoads::NONE;
  static constexpr bool BIAS_IS_FP32 = BIAS == BiasLoads::FP32_BOXES;
  static constexpr bool BIAS_IN_BOXES = BIAS == BiasLoads::BOXES || BIAS_IS_FP32;
  // With ELEMENTS: true if the bias may be fp32.
  static constexpr bool BIAS_TAKES_FP32 = HEAD_DIM <= 64;
  using Params = std::conditional_t<
      DROPS, DkdvDropoutSm90Params,
      std::conditional_t<BIAS_IN_BOXES, DkdvBiasSm90Params,
                         std::conditional_t<HAS_SCORE_MOD, DkdvScoredSm90Params, DkdvSm90Params>>>;
  static constexpr bool SHARES_QUERIES = true;
  static constexpr int CONSUMERS = 2;  // warpgroups, one per mask code of a tile list's entry
  static constexpr int BLOCK_M = MASK_TILE;
  static constexpr int BLOCK_N = CONSUMERS * 64;
  static constexpr int BLOCK_ROWS = BLOCK_N;
  // True if the warpgroups of keys also compute dQ, because their dK and dV leave no registers for
  // a separate warpgroup of dQ.
  static constexpr bool KEYS_MULTIPLY = HEAD_DIM + HEAD_DIM_V > 256;
  static_assert(!DROPS || !KEYS_MULTIPLY, "dV is added behind dS, for which P^T has marks");
  static constexpr int WARPGROUPS = CONSUMERS + (KEYS_MULTIPLY ? 1 : 2);  // including the loader
  static_assert(Plan::WARPS == WARPGROUPS * WARPS_OF_GROUP);
  // 2 if a warpgroup of keys has registers for S^T and dP^T in addition to dK and dV, else 1.
  static constexpr int SCORES_AT_A_TIME = HEAD_DIM > 96 ? 1 : 2;
  // True if K and V stay in registers as A operands, so that the products read less shared memory.
  static constexpr bool KEYS_IN_REGISTERS =
      HEAD_DIM == 64 && HEAD_DIM_V == 64 && !HAS_SCORE_MOD && BIAS != BiasLoads::ELEMENTS;
  static constexpr int LOADER_REGISTERS = KEYS_MULTIPLY ? 24 : 32;
  static constexpr int CONSUMER_REGISTERS = KEYS_MULTIPLY ? 240 : HEAD_DIM == 96 ? 200 : 208;
  static constexpr int DQ_REGISTERS = KEYS_MULTIPLY ? 0 : HEAD_DIM == 96 ? 80 : 64;
  static_assert(LOADER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS + DQ_REGISTERS <=
                    WARPGROUPS * registers_at_launch(Plan::WARPS * 32),
                "a warp that asks for more registers than there are waits for ever");

  // Threads at the barriers KEYS_CLEARED and KEYS_READ.
  static constexpr int KEY_READERS = (WARPGROUPS - 1) * WARPGROUP;

  static constexpr int DS_STAGES = Plan::DS_STAGES;
  static constexpr int DQ_STAGES = Plan::DQ_STAGES;
  static_assert(!KEYS_MULTIPLY || (DS_STAGES == 1 && DQ_STAGES == 1));
  // Threads that store dQ: one per stage, or two that share the only stage. NOTE: three threads
  // cannot share a stage, because a thread that waits for dq_read tests only the phase's parity.
  static constexpr int DQ_THREADS = KEYS_MULTIPLY ? 2 : DQ_STAGES;
  static_assert(DQ_THREADS < WARPS_OF_GROUP, "each has a warp beside the one that loads");
  // The number of items of dQ in shared memory. Each thread that stores dQ works on one item and
  // describes its next one.
  static constexpr int DQ_ITEMS = DQ_THREADS == 2 ? 4 : 8;
  static_assert(DQ_ITEMS >= 2 * DQ_THREADS);

  using KTile = Panels<BLOCK_N>;
  using QTile = Panels<BLOCK_M>;
  using Gradients = Ring<DS_STAGES>;
  using DsTile = Panels<BLOCK_N>;  // dS^T of a stage; a row is a key
  // A warpgroup's bias, in the memory where the warpgroup later stores dS^T; a row is a query. In
  // fp32 it has a second panel, after the dS^T of both warpgroups.
  using BiasTile = Panels<BLOCK_M>;
  static constexpr int BIAS_PANELS = BIAS_IS_FP32 ? 2 : 1;
  static constexpr int DS_BYTES = DsTile::count(BLOCK_M) * DsTile::BYTES;
  static_assert(CONSUMERS * BiasTile::BYTES == DS_BYTES);
  using DqTile = Panels<BLOCK_M>;  // rounded dQ in a stage
  static constexpr int PANELS = KTile::count(HEAD_DIM);
  static constexpr int V_PANELS = KTile::count(HEAD_DIM_V);
  static constexpr int DQ_FLOATS = BLOCK_M * HEAD_DIM;  // floats of dQ per query tile
  static constexpr int DQ_BYTES = DQ_FLOATS * sizeof(float);

  struct Stage {
    alignas(1024) uint8_t q[PANELS * QTile::BYTES];
    alignas(1024) uint8_t dout[V_PANELS * QTile::BYTES];
  };
  struct SmemOfAll {
    alignas(1024) uint8_t k[PANELS * KTile::BYTES];    // reused to stage dK
    alignas(1024) uint8_t v[V_PANELS * KTile::BYTES];  // reused to stage dV
    Stage stage[Plan::STAGES];
    alignas(1024) uint8_t ds[DS_STAGES][BIAS_PANELS * DS_BYTES];
    alignas(1024) uint8_t dq[DQ_STAGES][DQ_BYTES];
    alignas(16) float lse_log2[Plan::STAGES][BLOCK_M];
    alignas(16) float delta[Plan::STAGES][BLOCK_M];
    FusedItem item[Plan::STAGES];
    DqItem dq_item[DQ_ITEMS];
    DkdvSm90Work work;
    uint64_t keys_full;
    StageBarriers<Plan::STAGES> barriers;
    uint64_t described[DQ_ITEMS];                      // the item of dQ may be read
    uint64_t ds_full[DS_STAGES], ds_empty[DS_STAGES];  // dS^T is stored; it has been read
    uint64_t dq_ready[DQ_STAGES], dq_done[DQ_STAGES];  // the stage may be used; it has been used
    uint64_t dq_read;                                  // the only stage of dQ has been read
    __device__ SmemOfAll() = delete;                   // layout of shared memory, never constructed

    // Waits until this stage of dS^T has been read.
    __device__ __forceinline__ void wait_for_place(const Gradients& place) const {
      mbarrier_wait(shared_address(&ds_empty[place.stage()]), place.parity() ^ 1);
    }
    // Returns the address of the bias of the keys of warpgroup `half`.
    __device__ __forceinline__ uint32_t bias_tile(int half, const Gradients& place) const {
      return shared_address(ds[place.stage()]) + half * BiasTile::BYTES;
    }
  };
  struct SmemWithBias : SmemOfAll {
    uint64_t bias_full[DS_STAGES];
    __device__ SmemWithBias() = delete;
  };
  using Smem = std::conditional_t<BIAS_IN_BOXES, SmemWithBias, SmemOfAll>;
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FusedSm90Config : FusedSm90ConfigOf<FusedSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                           HEAD_DIM, HEAD_DIM_V, PLAN, false> {};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FusedScoredSm90Config : FusedSm90ConfigOf<FusedScoredSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>,
                                                 Target, T, HEAD_DIM, HEAD_DIM_V, PLAN, true> {};

}  // namespace flash_dist

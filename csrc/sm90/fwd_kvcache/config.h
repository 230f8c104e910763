// Tiles, threads and shared memory of the Hopper forward that is bit-identical to decoding.
#pragma once

#include "core/config.h"
#include "core/fwd_kvcache.h"
#include "core/panels.cuh"
#include "decode_plans.h"
#include "sm90/fwd/config.h"
#include "sm90/fwd_kvcache/work.cuh"
#include "sm90/stages.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

struct FwdKvcacheSm90Params : FwdSm90Params {
  CacheParams cache;
  float4* parked;  // see FwdKvcacheCall::parked
  int box_keys;    // keys per box of k or v, contiguous in the cache; a power of two
  // True if every sequence is as long as the cache entry: key rows past its end then read as zeros.
  bool ends_in_zeros;
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdKvcacheSm90Config
    : Config<FwdKvcacheSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = FwdKvcacheSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  using Params = FwdKvcacheSm90Params;
  using Work = FwdKvcacheWork;
  static constexpr bool HAS_SCORE_MOD = false;
  static constexpr bool TAKES_TICKETS = true;
  static constexpr int CONSUMERS = Plan::WARPS / 4 - 1;  // warpgroups with 64 queries each
  static constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;
  static constexpr int BLOCK_M = CONSUMERS * 64;
  static constexpr int BLOCK_ROWS = BLOCK_M;
  static constexpr int BLOCK_N = KEY_BLOCK;
  static constexpr int PIECE = 64;  // columns of O per product
  static constexpr int PIECES = HEAD_DIM_V / PIECE;
  // P is summed in the same parts as in mma/decode/kernel.cuh: PARTS parts per SUMMED_KEYS keys.
  static constexpr int PARTS = 4;
  static constexpr int SUMMED_KEYS = DecodeWidePlan<HEAD_DIM, HEAD_DIM_V, 99>::BLOCK_N;
  static constexpr int LOADER_REGISTERS = CONSUMERS == 3 ? 32 : 24;
  static constexpr int CONSUMER_REGISTERS =
      registers_left(CONSUMERS, Plan::MIN_BLOCKS, LOADER_REGISTERS);
  static_assert(HEAD_DIM % PIECE == 0 && HEAD_DIM_V % PIECE == 0);

  using QTile = Panels<BLOCK_M>;
  using QPanels = QTile;
  using KTile = Panels<BLOCK_N>;
  using Queries = Ring<1>;
  using Keys = Ring<Plan::STAGES>;
  using Works = Ring<WORKS>;
  static constexpr int Q_PANELS = QTile::count(HEAD_DIM);
  static constexpr int V_PANELS = QTile::count(HEAD_DIM_V);
  static constexpr int K_BYTES = Q_PANELS * KTile::BYTES;
  static constexpr int V_BYTES = V_PANELS * KTile::BYTES;
  static constexpr int OUT_BYTES = V_PANELS * QTile::BYTES;
  static constexpr OutStage OUT_STAGE = HEAD_DIM > 64 ? OutStage::QUERIES : OutStage::OWN;
  // True if O of the tile is kept in global memory while a group of key blocks is computed.
  static constexpr bool PARKS_IN_MEMORY = HEAD_DIM_V >= PARKED_COLUMNS;
  static constexpr int OT = HEAD_DIM_V / 8;

  struct Smem {
    alignas(1024) uint8_t q[1][Q_PANELS * QTile::BYTES];
    uint8_t out[OUT_STAGE == OutStage::OWN ? OUT_BYTES : 0];
    alignas(1024) uint8_t k[Plan::STAGES][K_BYTES];
    alignas(1024) uint8_t v[Plan::STAGES][V_BYTES];
    float4 parked[PARKS_IN_MEMORY ? 0 : OT][CONSUMER_THREADS];
    float2 parked_stats[BLOCK_M];  // top and sum per row
    Work work[WORKS];
    FwdSm90Progress progress;
    StageBarriers<WORKS> work_barriers;
    StageBarriers<1> q_barriers;
    StageBarriers<Plan::STAGES> k_barriers, v_barriers;
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert((SMEM_BYTES + 1024) * Plan::MIN_BLOCKS <= smem_plan_bytes(PLAN) + 1024);
};

}  // namespace flash_dist

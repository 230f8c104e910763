// Tiles, threads and shared memory of the kernel that reads a cache of latent keys.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/tile.cuh"
#include "decode_plans.h"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct MlaConfig : Config<MlaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = MlaPlan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int WARPS = Plan::WARPS;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int LOADERS = THREADS;
  static constexpr int BLOCK_ROWS = 16;              // rows per work tile, shared by all warps
  static constexpr int WARPS_N = WARPS;              // warps that share the columns of O
  static constexpr int BLOCK_N = Plan::BLOCK_N;      // keys per tile
  static constexpr int TILES = KEY_BLOCK / BLOCK_N;  // tiles per key block
  static constexpr bool V_IN_K = true;               // V is the first columns of K
  static constexpr bool KEEPS_CURSORS = false;
  using Layout = SwizzledRows<HEAD_DIM>;  // swizzle of Q, K and V in shared memory
  // A warp computes partial sums of S for 16 keys of a tile, over 16 columns out of every LINE
  // columns of K. The warp's steps are then whole 128-byte lines apart.
  static constexpr int KEY_PARTS = BLOCK_N / 16;
  static constexpr int COLUMN_PARTS = WARPS / KEY_PARTS;
  static constexpr int LINE = COLUMN_PARTS * 16;
  static constexpr int STEPS = HEAD_DIM / LINE;
  static_assert(LINE % 64 == 0 && HEAD_DIM % LINE == 0 && HEAD_DIM_V % (WARPS * 16) == 0);

  // Partial sums of S, [column part][key part], each as the fragments of two mma.
  struct Scores {
    float4 parts[COLUMN_PARTS][KEY_PARTS][2][32];
  };
  struct Smem {
    alignas(128) uint16_t ring[Plan::STAGES][BLOCK_N * HEAD_DIM];
    alignas(128) uint16_t q[BLOCK_ROWS * HEAD_DIM];
    Scores scores;
    typename DecodeSplits<THREADS>::Smem splits;
    SplitBounds bounds;
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

}  // namespace flash_dist

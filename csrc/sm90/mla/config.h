// Tiles, threads and shared memory of the kernel that reads a cache of latent keys for many heads.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/panels.cuh"
#include "decode_plans.h"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct MlaSm90Config
    : Config<MlaSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = MlaSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>;
  static constexpr int THREADS = Plan::WARPS * 32;
  static constexpr int WARPGROUP = 128;                    // threads
  static constexpr int WARPGROUPS = THREADS / WARPGROUP;   // which share the columns of O
  static constexpr int COLUMNS = HEAD_DIM_V / WARPGROUPS;  // of O, of one
  static constexpr int LOADERS = WARPGROUP;  // threads of the last one, which waits for P
  static constexpr int TASK_ROWS = 64;
  static constexpr int BLOCK_ROWS = TASK_ROWS;
  static constexpr int BLOCK_N = Plan::BLOCK_N;      // keys of a tile
  static constexpr int TILES = UNIT_KEYS / BLOCK_N;  // of a unit
  static constexpr bool V_IN_K = true;
  using Shares = DecodeShares<THREADS, LATENT_PART_UNITS>;
  using Tile = Panels<64>;  // of Q and of K
  static_assert(TASK_ROWS == 64 && BLOCK_N == 64 && COLUMNS % Tile::COLUMNS == 0);

  // Where a copy of 16 bytes goes.
  struct Layout {
    static constexpr int CHUNKS = HEAD_DIM / 8;
    static constexpr int ROW_BYTES = Tile::ROW_BYTES;
    __device__ __forceinline__ static int offset(int row, int chunk) {
      return Tile::offset(row, chunk);
    }
  };

  // What the warpgroup that has S tells the others, each thread the one with its rows and columns.
  struct Exchange {
    uint4 weights[BLOCK_N / 16][WARPGROUP];  // A operands
    union {
      float2 keep[WARPGROUP];   // of its two rows, what O is multiplied by
      float4 stats[WARPGROUP];  // and at the end of a part: top, sum
    };
  };
  struct Smem {
    alignas(1024) uint16_t ring[Plan::STAGES][BLOCK_N * HEAD_DIM];
    alignas(1024) uint16_t q[TASK_ROWS * HEAD_DIM];
    Exchange exchange;
    typename Shares::Smem shares;
    int share_begin, share_end;
    __device__ Smem() = delete;  // laid over shared memory, never made
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

}  // namespace flash_dist

// Tiles, threads and shared memory of the mma.sync decode kernels.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/tile.cuh"
#include "decode_plans.h"
#include "plans.h"

namespace flash_dist {

template <class Plan_, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct DecodeConfigOf : Config<Plan_, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Plan = Plan_;
  static constexpr int WARPS = Plan::WARPS;
  static constexpr int THREADS = WARPS * 32;
  static constexpr int LOADERS = THREADS;
  static constexpr int BLOCK_N = Plan::BLOCK_N;            // keys per tile of K or V
  static constexpr int BLOCK_ROWS = Plan::ROWS;            // rows per work tile
  static constexpr int WARPS_N = WARPS * 16 / BLOCK_ROWS;  // warps that share 16 rows
  static constexpr int TILES = KEY_BLOCK / BLOCK_N;        // tiles of K, and of V, per key block
  // KEY_WARPS of the WARPS_N warps share the keys of a tile. KEY_GROUPS such groups of warps take
  // the tiles round-robin.
  static constexpr int KEY_WARPS = WARPS_N < BLOCK_N / 8 ? WARPS_N : BLOCK_N / 8;
  static constexpr int KEY_GROUPS = WARPS_N / KEY_WARPS;
  static constexpr int OWN_TILES = TILES / KEY_GROUPS;   // tiles that contain a warp's keys
  static constexpr int WARP_KEYS = BLOCK_N / KEY_WARPS;  // keys of a tile per warp
  static constexpr int KEY_TILES = WARP_KEYS / 8;        // 8-column tiles of a warp's S
  static constexpr bool V_IN_K = false;
  static constexpr bool IN_PAIRS = false;  // two blocks per work tile: mma/decode/pair.cuh
  using Layout = SwizzledRows<HEAD_DIM>;   // layout of Q, K and V in shared memory
  using Splits = DecodeSplits<THREADS>;
  // Number of partial sums of a row of P over a key block. It is 4 for every WARPS_N up to 4, so
  // that the bits are the same.
  static constexpr int PARTS = WARPS_N < 4 ? 4 : WARPS_N;
  // True if no other warp shares a warp's rows. The warp then keeps P in registers, and O of the
  // work tile and the cursors must be in shared memory (mma/decode/rows.cuh).
  static constexpr bool OWNS_ROWS = WARPS_N == 1;
  static constexpr bool KEEPS_CURSORS = OWNS_ROWS;
  // True if there are so few registers that, for HEAD_DIM > 128, Q of the next work tile is not
  // loaded ahead. Before sm_80, registers hold tiles of K and V. PTX may be assembled for any
  // target, and loading ahead would spill 16 bytes on sm_100.
  static constexpr bool FEW_REGISTERS = !Target::HAS_CP_ASYNC || Target::CODE == Code::PTX;
  static constexpr bool LOADS_LATE =
      BLOCK_ROWS > 16 || HEAD_DIM > 256 || (FEW_REGISTERS && HEAD_DIM > 128);
  static constexpr int UNROLL = OWNS_ROWS ? 2 : STEPS_AHEAD<Target>;
  static_assert(HEAD_DIM == HEAD_DIM_V && BLOCK_N % (KEY_WARPS * 8) == 0 && PARTS % WARPS_N == 0);
  static_assert(WARPS_N % KEY_WARPS == 0 && TILES % KEY_GROUPS == 0);

  // first_of_tile: first key of warp warp_n in a tile. tile_number: index in the key block of the
  // warp's i-th tile.
  __device__ __forceinline__ static int first_of_tile(int warp_n) {
    return (KEY_GROUPS == 1 ? warp_n : warp_n % KEY_WARPS) * WARP_KEYS;
  }
  __device__ __forceinline__ static int tile_number(int i, int warp_n) {
    return KEY_GROUPS == 1 ? i : i * KEY_GROUPS + warp_n / KEY_WARPS;
  }

  // Data exchanged between warps that share rows, for one key block.
  struct Exchange {
    alignas(128) uint16_t p[BLOCK_ROWS * KEY_BLOCK];
    float tops[WARPS_N][BLOCK_ROWS];  // row maxima over a warp's keys
    float sums[PARTS][BLOCK_ROWS];
  };
  // O of the work tile, for warps that own their rows. Each thread has a slot.
  struct Parked {
    float4 out[OWNS_ROWS ? HEAD_DIM / 8 : 1][THREADS];
    float4 stats[THREADS];  // top and sum of the thread's two rows
  };

  struct Smem {
    alignas(128) uint16_t ring[Plan::STAGES][BLOCK_N * HEAD_DIM];  // tiles of K, then of V
    alignas(128) uint16_t q[BLOCK_ROWS * HEAD_DIM];
    union {
      Exchange exchange;
      Parked parked;
    };
    typename DecodeSplits<THREADS>::Smem splits;
    SplitBounds bounds;
    struct {
      DecodeCursor computed, loaded;
    } cursors[KEEPS_CURSORS ? Plan::WARPS : 1];
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DecodeConfig =
    DecodeConfigOf<DecodePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;
template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DecodeWideConfig = DecodeConfigOf<DecodeWidePlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                        HEAD_DIM, HEAD_DIM_V, PLAN>;

}  // namespace flash_dist

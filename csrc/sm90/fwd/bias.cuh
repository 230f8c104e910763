// The bias of the forward kernel for Hopper, from global memory to the scores: s * scale + bias,
// and -inf where the bias masks (core/bias.cuh).
//
// A stage has two panels of 128 bytes for each query (core/panels.cuh): 128 keys of 16 bits, or 64
// of fp32. So a step takes one stage or two. The loading thread fills a ring of stages by boxes of
// 16-bit columns. If all queries share one row of the bias, a box has only that row. A warp loads
// the first stage into registers before it waits for the scores.
#pragma once

#include "fwd_bias_plans.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/pairs.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/bias.cuh"
#include "sm90/fwd/tiles.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdBiasSm90Config : FwdSm90ConfigOf<FwdBiasSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                           HEAD_DIM, HEAD_DIM_V, PLAN, FwdBiasSm90Params> {
  // True if the kernel supports a bias in fp32. With two stages it would be slower than the general
  // family.
  static constexpr bool TAKES_FP32 = FwdBiasSm90Config::BIAS_STAGES > 2;
};

// The tile type of a kernel with a bias in fp32 or in 16 bits.
template <class Config, bool IS_FP32>
struct FwdBiasSm90Tiles : FwdSm90Tiles<Config, Config::BLOCK_N, KeySource::BOTH> {
  static constexpr bool BIAS_IS_FP32 = IS_FP32;
  static constexpr int BIAS_PANEL = IS_FP32 ? 32 : 64;            // keys per panel
  static constexpr int BIAS_KEYS = 2 * BIAS_PANEL;                // keys per stage
  static constexpr int BIAS_PARTS = Config::BLOCK_N / BIAS_KEYS;  // stages per step
  using Biases = Ring<Config::BIAS_STAGES>;
  using BiasFragment = uint32_t[32];  // biases of one stage: 16-bit pairs, or fp32
  static_assert(Config::ONE_MAINLOOP && Config::BLOCK_N == 2 * MASK_TILE && Config::TAIL_N == 0);
};

// Returns the first key of a panel of step i; 0 if the list has no such tile.
template <class Tiles>
__device__ __forceinline__ int bias_key(const typename Tiles::Work& work, int i, int panel) {
  const typename Tiles::Steps steps{work.bounds};
  return max(steps.key(i, panel * Tiles::BIAS_PANEL), 0);
}

// Returns the bias stage of part `part` of the step whose K is in the stage of `keys`.
template <class Tiles>
__device__ __forceinline__ typename Tiles::Biases bias_stage(const typename Tiles::Keys& keys,
                                                             int part) {
  return {keys.passed * Tiles::BIAS_PARTS + part};
}

// Starts the copies of the bias of step j. Called by the loading thread.
template <class Tiles>
__device__ __forceinline__ void load_bias(const typename Tiles::Params& params,
                                          typename Tiles::Smem& smem,
                                          const typename Tiles::Work& work, int j,
                                          const typename Tiles::Keys& keys) {
  const FwdBlock& block = work.block;
#pragma unroll 1
  for (int part = 0; part < Tiles::BIAS_PARTS; ++part) {
    const auto stage = bias_stage<Tiles>(keys, part);
    smem.bias_barriers.wait_for_place(stage);
    const uint32_t barrier = smem.bias_barriers.data(stage);
    mbarrier_expect(barrier, 2 * params.bias_rows * Tiles::QTile::ROW_BYTES);
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const int key = bias_key<Tiles>(work, j, 2 * part + panel);
      const BoxPlace at{Tiles::BIAS_IS_FP32 ? 2 * key : key, params.bias_rows == 1 ? 0 : block.row0,
                        0, block.head * params.bias_axes.head_kv,
                        block.batch * params.bias_axes.batch};
      load_box(shared_address(smem.bias[stage.stage()]) + panel * Tiles::QTile::BYTES, params.bias,
               at, barrier);
    }
  }
}

// The bias of a consumer warp's 16 queries. row: the index of the first query in the tile.
template <class Tiles>
struct FwdSm90Bias {
  using Fragment = typename Tiles::BiasFragment;
  using T = typename Tiles::T;
  static constexpr bool IS_FP32 = Tiles::BIAS_IS_FP32;
  static constexpr int TILES = Tiles::BIAS_PANEL / 8;  // tiles of 8 keys per panel

  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;
  const typename Tiles::Keys& keys;

  // Loads part PART of a step's bias into registers.
  template <int PART>
  __device__ __forceinline__ void fetch(Fragment& x, int row) const {
    const auto stage = bias_stage<Tiles>(keys, PART);
    smem.bias_barriers.wait_for_data(stage);
    read_stage(x, shared_address(smem.bias[stage.stage()]), params.bias_rows == 1 ? 0 : row);
    smem.bias_barriers.release(stage.stage());
  }

  // Computes s * scale + bias. x: the first part of the bias, already fetched.
  template <int NT>
  __device__ __forceinline__ void add(Accumulator<1, NT>& s, Fragment& x, int row) const {
    add_part<0>(s, x);
    if constexpr (Tiles::BIAS_PARTS == 2) {
      fetch<1>(x, row);
      add_part<1>(s, x);
    }
  }

 private:
  // Returns the index of a bias in a fragment. n: group of 8 keys; h: upper or lower 8 rows; e: the
  // column of a pair (fp32 only).
  __device__ __forceinline__ static constexpr int at(int n, int h, int e = 0) {
    return IS_FP32 ? (2 * n + h) * 2 + e : 2 * n + h;
  }

  __device__ __forceinline__ void read_stage(Fragment& x, uint32_t tile, int row) const {
    using Tile = typename Tiles::QTile;
    const int lane = fresh_thread() % 32;
    const bool same = params.bias_rows == 1;  // all queries have the bias of the first row
    if constexpr (IS_FP32) {
      const int down = same ? 0 : lane / 4;
      const uint32_t own =
          tile + (row + down) * Tile::ROW_BYTES + lane % 2 * 8 + ((lane % 4 / 2 ^ down) << 4);
      const uint32_t next = same ? 0 : 8 * Tile::ROW_BYTES;
#pragma unroll
      for (int n = 0; n < 2 * TILES; ++n) {
        const uint32_t from = (own ^ n % TILES * 32) + n / TILES * Tile::BYTES;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 pair = load_shared_8(from + h * next);
          x[at(n, h, 0)] = __float_as_uint(pair.x);
          x[at(n, h, 1)] = __float_as_uint(pair.y);
        }
      }
    } else {
      const int down = same ? 0 : lane % 16;
      const uint32_t own = tile + (row + down) * Tile::ROW_BYTES + ((lane / 16 ^ down % 8) << 4);
#pragma unroll
      for (int n = 0; n < 2 * TILES; n += 2) {
        uint32_t four[4];  // upper and lower 8 rows for 8 keys, then for the next 8 keys
        ldmatrix_x4(four, (own ^ n % TILES * 16) + n / TILES * Tile::BYTES);
#pragma unroll
        for (int m = 0; m < 4; ++m) x[at(n, 0) + m] = four[m];
      }
    }
  }

  template <int PART, int NT>
  __device__ __forceinline__ void add_part(Accumulator<1, NT>& s, const Fragment& x) const {
    const float scale = params.p.softmax_scale;
#pragma unroll
    for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& first = s.x[0][PART * 2 * TILES + n][2 * h];
        float& second = s.x[0][PART * 2 * TILES + n][2 * h + 1];
        const float2 bias =
            IS_FP32 ? float2{bias_of_fp32(x[at(n, h, 0)]), bias_of_fp32(x[at(n, h, IS_FP32)])}
                    : bias_of_pair<T>(x[at(n, h)]);
        first = fmaf(first, scale, bias.x);
        second = fmaf(second, scale, bias.y);
      }
  }
};

}  // namespace flash_dist

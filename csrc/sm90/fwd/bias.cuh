// The bias of the forward kernel for Hopper, from global memory to the scores: s * scale + bias, or
// -inf where the bias masks the score (core/bias.cuh).
//
// A stage has two panels (core/panels.cuh), each with 128 bytes per query: together the biases of
// 128 keys in 16 bits, or of 64 in fp32. So a step of 128 keys takes one stage or two. A loading
// thread fills a ring of stages with boxes of 16-bit columns, of one row if all queries share it;
// or warps copy rows that no tensor map describes (sm90/bias_rows.cuh). A warp loads a step's
// stages into registers before it waits for the scores.
//
// In fp32, 128 x 128 biases take 64 KB. HBM delivers them in 1.9 us per multiprocessor, no faster
// than the kernel without a bias computes the tile. At head_dim 128 a step has 64 keys, so that the
// biases of four steps fit in shared memory next to K and V.
#pragma once

#include "fwd_bias_plans.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/pairs.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/bias.cuh"
#include "sm90/bias_rows.cuh"
#include "sm90/fwd/tiles.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdBiasSm90Config : FwdSm90ConfigOf<FwdBiasSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                           HEAD_DIM, HEAD_DIM_V, PLAN, FwdBiasSm90Params> {};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdFp32BiasSm90Config
    : FwdSm90ConfigOf<FwdFp32BiasSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                      HEAD_DIM_V, PLAN, FwdFp32BiasSm90Params> {};

// The tile type of a kernel with a bias.
template <class Config>
struct FwdBiasSm90Tiles : FwdSm90Tiles<Config, Config::BLOCK_N, KeySource::BOTH> {
  static constexpr int BIAS_PANEL = Config::BIAS_IS_FP32 ? 32 : 64;  // keys per panel
  static constexpr int BIAS_KEYS = 2 * BIAS_PANEL;                   // keys per stage
  static constexpr int BIAS_PARTS = Config::BLOCK_N / BIAS_KEYS;     // stages per step
  using Biases = Ring<Config::BIAS_STAGES>;
  using BiasFragment = uint32_t[BIAS_PARTS][32];  // per stage: pairs of 16-bit biases, or fp32
  static_assert(Config::ONE_MAINLOOP && Config::BLOCK_N % BIAS_KEYS == 0 && Config::TAIL_N == 0);
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

// Returns the number of this warp among those that load only a bias. It is negative in the warp of
// the loading thread, whose warpgroup comes before that behind the consumers.
template <class Config>
__device__ __forceinline__ int bias_warp() {
  const int warp = fresh_thread() / 32;
  return warp < WARPS_OF_GROUP ? warp - 1 : warp - 1 - Config::CONSUMERS * WARPS_OF_GROUP;
}

// A stage of a bias that warps copy (sm90/bias_rows.cuh): a part of a step.
template <class Tiles>
struct FwdBiasStage {
  typename Tiles::Biases ring;
  int step, part;
  uint32_t first_numbers[2];  // of the panels, see BiasPanelCopy
};

// The copies of the bias of a work tile. All lanes of BIAS_WARPS warps call these functions.
template <class Tiles>
struct FwdBiasCopy {
  using Stage = FwdBiasStage<Tiles>;
  using Panel = BiasPanelCopy<typename Tiles::QTile, Tiles::BIAS_IS_FP32>;
  static constexpr int BYTES = Tiles::BIAS_IS_FP32 ? 4 : 2;  // per number

  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;
  const typename Tiles::Work& work;

  __device__ __forceinline__ void start(Stage& stage) const {
    smem.bias_barriers.wait_for_place(stage.ring);
#pragma unroll
    for (int i = 0; i < 2; ++i) stage.first_numbers[i] = panel(stage, i).start();
    cp_async_commit();
  }
  // Passes a stage on to the consumers. PENDING: the number of stages that were started after it.
  template <int PENDING>
  __device__ __forceinline__ void finish(const Stage& stage) const {
    cp_async_wait<PENDING>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) panel(stage, i).finish(stage.first_numbers[i]);
    __syncwarp();
    if (fresh_thread() % 32 == 0) smem.bias_barriers.arrive(stage.ring);
  }

 private:
  __device__ __forceinline__ Panel panel(const Stage& stage, int i) const {
    const BiasParams& bias = params.p.bias;
    const FwdBlock& block = work.block;
    const int row0 = bias.row == 0 ? 0 : block.row0;
    const int key = bias_key<Tiles>(work, stage.step, 2 * stage.part + i);
    const int64_t first = block.batch * bias.batch + block.head * bias.head + row0 * bias.row + key;
    // The warps that copy most rows of one panel do not copy most of the other.
    const int warp = (bias_warp<Tiles>() + i * BIAS_WARPS / 2) % BIAS_WARPS;
    return {shared_address(smem.bias[stage.ring.stage()]) + i * Tiles::QTile::BYTES,
            warp,
            {static_cast<const uint8_t*>(bias.data) + BYTES * first, BYTES * bias.row,
             min(params.bias_rows, params.p.seqlen_q - row0),
             BYTES * min(params.p.seqlen_k - key, Tiles::BIAS_PANEL + 1)}};
  }
};

// Starts the copies of the bias of step j, in boxes.
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

// The bias of a consumer warp's 16 queries.
template <class Tiles>
struct FwdSm90Bias {
  using Fragment = typename Tiles::BiasFragment;
  using Part = uint32_t[32];
  using T = typename Tiles::T;
  static constexpr int PARTS = Tiles::BIAS_PARTS;
  static constexpr bool IS_FP32 = Tiles::BIAS_IS_FP32;
  static constexpr int TILES = Tiles::BIAS_PANEL / 8;  // tiles of 8 keys per panel

  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;
  const typename Tiles::Keys& keys;

  // Loads the bias of a step into registers. row: the index of the first query in the tile.
  __device__ __forceinline__ void fetch(Fragment& x, int row) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const auto stage = bias_stage<Tiles>(keys, part);
      smem.bias_barriers.wait_for_data(stage);
      read_stage(x[part], shared_address(smem.bias[stage.stage()]),
                 params.bias_rows == 1 ? 0 : row);
      smem.bias_barriers.release(stage.stage());
    }
  }

  // Computes s * scale + bias. x: the bias, already fetched.
  template <int NT>
  __device__ __forceinline__ void add(Accumulator<1, NT>& s, const Fragment& x) const {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) add_part(s, x[part], part * 2 * TILES);
  }

 private:
  // Returns the index in Part of a pair of 16-bit biases, or of an fp32 bias. n: group of 8 keys;
  // h: upper or lower 8 rows; e: the column in a pair (fp32 only).
  __device__ __forceinline__ static constexpr int at(int n, int h, int e = 0) {
    return IS_FP32 ? (2 * n + h) * 2 + e : 2 * n + h;
  }

  // Reads 8 keys of 8 queries at a time. Rows 2 * i and 2 * i + 1 have the same keys in the same
  // banks. So lanes of odd rows read tile n ^ 2 instead of n; the registers are swapped at the end.
  __device__ __forceinline__ void read_fp32(Part& x, uint32_t tile, int row) const {
    using Tile = typename Tiles::QTile;
    const int lane = fresh_thread() % 32;
    const bool same = params.bias_rows == 1;  // all queries have the bias of the first row
    const int down = same ? 0 : lane / 4;
    const bool odd = down % 2 != 0;
    const uint32_t own = tile + (row + down) * Tile::ROW_BYTES + lane % 2 * 8 +
                         ((lane % 4 / 2 ^ down ^ (odd ? 4 : 0)) << 4);
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
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      constexpr int APART = at(2, 0, 0);  // registers between tiles n and n + 2
      if (i & APART) continue;
      const uint32_t low = x[i], high = x[i + APART];
      x[i] = odd ? high : low;
      x[i + APART] = odd ? low : high;
    }
  }

  __device__ __forceinline__ void read_stage(Part& x, uint32_t tile, int row) const {
    using Tile = typename Tiles::QTile;
    if constexpr (IS_FP32) {
      read_fp32(x, tile, row);
    } else {
      const int lane = fresh_thread() % 32;
      const bool same = params.bias_rows == 1;  // all queries have the bias of the first row
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

  // Adds a part of the bias. first: the first of its 8-key tiles in `s`.
  template <int NT>
  __device__ __forceinline__ void add_part(Accumulator<1, NT>& s, const Part& x, int first) const {
    const float scale = params.p.softmax_scale;
#pragma unroll
    for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&own)[4] = s.x[0][first + n];
        const float2 bias =
            IS_FP32 ? float2{bias_of_fp32(x[at(n, h, 0)]), bias_of_fp32(x[at(n, h, IS_FP32)])}
                    : bias_of_pair<T>(x[at(n, h)]);
        own[2 * h] = fmaf(own[2 * h], scale, bias.x);
        own[2 * h + 1] = fmaf(own[2 * h + 1], scale, bias.y);
      }
  }
};

}  // namespace flash_dist

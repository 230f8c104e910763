// Two policies for the keys of a row: one warp has all keys, or several warps share them. Each
// policy provides the steps of mma/decode/kernel.cuh that depend on this choice.
#pragma once

#include "core/accumulator.cuh"
#include "core/decode_rows.cuh"
#include "core/softmax.cuh"
#include "mma/decode/config.h"
#include "ptx/ldmatrix.cuh"

namespace flash_dist {

// A warp owns its rows. P stays in its registers, so O of the work tile is kept in shared memory
// while a group of key blocks is computed.
template <class Config>
struct OwnedRows {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  static constexpr int OT = Config::HEAD_DIM / 8;
  static constexpr int KEY_STEPS = Config::BLOCK_N / 16;  // steps of P @ V per tile
  using Scores = Accumulator<1, Config::KEY_TILES>[Config::TILES];
  using Sums = float[Config::PARTS][2];
  using Weights = uint32_t[KEY_BLOCK / 16][1][4];  // A operands of P @ V

  Smem& smem;

  __device__ __forceinline__ OwnedRows(Smem& smem_, const WarpPlace<Config>&) : smem(smem_) {}

  __device__ __forceinline__ void reduce_top(float (&top)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = quad_max(top[h]);
  }
  __device__ __forceinline__ void reduce_sums(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < Config::PARTS; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) sums[i][h] = quad_sum(sums[i][h]);
  }
  __device__ __forceinline__ float sum_of(const Sums& sums, int i, int h) const {
    return sums[i][h];
  }

  __device__ __forceinline__ void store_weights(const Scores& s, Weights& weights) const {
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i)
#pragma unroll
      for (int k = 0; k < KEY_STEPS; ++k) {
        to_a_operand<Target, T>(weights[i * KEY_STEPS + k], s[i], k);
      }
  }
  __device__ __forceinline__ uint32_t (&load_weights(Weights& weights, int k) const)[1][4] {
    return weights[k];
  }

  __device__ __forceinline__ void park(const Partial<OT>& tile) const {
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float (&x)[4] = tile.out.x[0][n];
      smem.parked.out[n][threadIdx.x] = {x[0], x[1], x[2], x[3]};
    }
    smem.parked.stats[threadIdx.x] = {tile.top[0], tile.top[1], tile.sum[0], tile.sum[1]};
  }
  __device__ __forceinline__ void unpark(Partial<OT>& tile) const {
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float4 x = smem.parked.out[n][threadIdx.x];
      float (&own)[4] = tile.out.x[0][n];
      own[0] = x.x, own[1] = x.y, own[2] = x.z, own[3] = x.w;
    }
    const float4 stats = smem.parked.stats[threadIdx.x];
    tile.top[0] = stats.x, tile.top[1] = stats.y, tile.sum[0] = stats.z, tile.sum[1] = stats.w;
  }
};

// WARPS_N warps share the rows; each has some keys of the key block. They exchange row maxima, P
// and sums through shared memory. Then each computes some columns of O.
template <class Config>
struct SharedRows {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  static constexpr int WARPS_N = Config::WARPS_N;
  static constexpr int OT = Config::HEAD_DIM / 8 / WARPS_N;
  static constexpr int WARP_PARTS = Config::PARTS / WARPS_N;
  using Scores = Accumulator<1, Config::KEY_TILES>[Config::OWN_TILES];
  using Sums = float[WARP_PARTS][2];
  using Weights = uint32_t[1][4];  // A operand of one step of P @ V

  Smem& smem;
  const WarpPlace<Config> own;
  const uint32_t sP;
  const Operand<KEY_BLOCK> a_p;

  __device__ __forceinline__ SharedRows(Smem& smem_, const WarpPlace<Config>& own_)
      : smem(smem_),
        own(own_),
        sP(shared_address(smem.exchange.p) + own.row0 * KEY_BLOCK * 2),
        a_p(Operand<KEY_BLOCK>::a(sP)) {}

  __device__ __forceinline__ void reduce_top(float (&top)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = quad_max(top[h]);
      if (threadIdx.x % 4 == 0) smem.exchange.tops[own.warp_n][own.row(h)] = top[h];
    }
    __syncthreads();  // all warps have stored their maxima
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int w = 0; w < WARPS_N; ++w) top[h] = fmaxf(top[h], smem.exchange.tops[w][own.row(h)]);
  }
  __device__ __forceinline__ void reduce_sums(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < WARP_PARTS; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[i][h] = quad_sum(sums[i][h]);
        if (threadIdx.x % 4 != 0) continue;
        smem.exchange.sums[own.warp_n * WARP_PARTS + i][own.row(h)] = sums[i][h];
      }
  }
  // Returns partial sum i of a row, which another warp may have stored. Call this after a barrier.
  __device__ __forceinline__ float sum_of(const Sums&, int i, int h) const {
    return smem.exchange.sums[i][own.row(h)];
  }

  __device__ __forceinline__ void store_weights(const Scores& s, Weights&) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Config::OWN_TILES; ++i)
#pragma unroll
      for (int n = 0; n < Config::KEY_TILES; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = Config::tile_number(i, own.warp_n) * Config::BLOCK_N +
                          Config::first_of_tile(own.warp_n) + n * 8;
          const float (&x)[4] = s[i].x[0][n];
          store_shared_4(
              sP + SwizzledRows<KEY_BLOCK>::offset(lane / 4 + 8 * h, key / 8) + lane % 4 * 4,
              pack<Target, T>(x[2 * h], x[2 * h + 1]));
        }
  }
  // Loads step k of the weights. Call this after a barrier.
  __device__ __forceinline__ uint32_t (&load_weights(Weights& weights, int k) const)[1][4] {
    ldmatrix_x4(weights[0], a_p.at(0, k));
    return weights;
  }

  // O of the work tile stays in registers.
  __device__ __forceinline__ void park(const Partial<OT>&) const {}
  __device__ __forceinline__ void unpark(Partial<OT>&) const {}
};

}  // namespace flash_dist

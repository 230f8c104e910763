// P of tiles of latent keys, and how tiles are combined.
//
// P of a tile is 2^(S * scale - top), rounded. top is the row's greatest scaled score in the tile,
// rounded up to a whole number. So P does not depend on other tiles, and another top changes P by a
// power of two, which is exact. The top of a row whose visible keys are all in one tile never
// changes, so it is not rounded up: the row's greatest P is then exactly 1. With so few keys, the
// rounding error of the greatest P would be a large part of the error of O.
//
// A group of key blocks has one chain of products P @ V over its tiles. Of the two tiles of a key
// block, the first tile is added first in the first half of O's columns, and the second tile is
// added first in the second half.
#pragma once

#include "core/accumulator.cuh"
#include "core/combine.cuh"
#include "core/panels.cuh"
#include "core/softmax.cuh"
#include "ptx/convert.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/pairs.cuh"
#include "ptx/wgmma.cuh"

namespace flash_dist {

constexpr int LATENT_TILE = 64;  // rows per tile, and keys per tile

// For the two rows of a lane: true if a tile has all keys that are visible to the row.
struct SeeOneTile {
  bool row[2];
};

template <class Target, class T>
struct LatentWeights {
  using Panel = Panels<LATENT_TILE>;
  static constexpr int STEPS = LATENT_TILE / 16;  // steps of P @ V
  using Scores = Accumulator<1, LATENT_TILE / 8>;
  uint32_t a[STEPS][1][4];  // A operands of the warp's rows

  // Replaces S by P. top and sum are those of the two rows of a lane; sum covers only the lane's
  // columns.
  __device__ __forceinline__ void make(Scores& s, float scale_log2, const SeeOneTile& one_tile,
                                       float (&top)[2], float (&sum)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float greatest = -INFINITY;
#pragma unroll
      for (int n = 0; n < LATENT_TILE / 8; ++n) {
        greatest = fmaxf(greatest, fmaxf(s.x[0][n][2 * h], s.x[0][n][2 * h + 1]));
      }
      top[h] = __fmul_rn(quad_max(greatest), scale_log2);
      if (!one_tile.row[h]) top[h] = ceilf(top[h]);
      const float offset = top[h] == -INFINITY ? 0.0f : top[h];
      sum[h] = 0.0f;
#pragma unroll
      for (int n = 0; n < LATENT_TILE / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s.x[0][n][2 * h + e];
          x = exp2_approx(fmaf(x, scale_log2, -offset));
          sum[h] += x;
        }
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k) to_a_operand<Target, T>(a[k], s, k);
  }

  // Multiplies P in the two rows of a lane by powers of two.
  __device__ __forceinline__ void scale(const float (&factors)[2]) {
    const uint32_t pairs[2] = {pack<Target, T>(factors[0], factors[0]),
                               pack<Target, T>(factors[1], factors[1])};
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][0][i] = multiply_pairs<T>(a[k][0][i], pairs[i % 2]);
  }

  // Stores P to a panel in shared memory; load() reads it back.
  __device__ __forceinline__ void store(uint32_t panel) const {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) stmatrix_x4(place(panel) ^ k * 32, a[k][0]);
  }
  __device__ __forceinline__ void load(uint32_t panel) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) ldmatrix_x4(a[k][0], place(panel) ^ k * 32);
  }

  // Stores P to global memory in the layout of a panel in shared memory.
  __device__ __forceinline__ void store(uint16_t* panel, int row) const {
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int offset = Panel::offset(row + i % 2 * 8, 2 * k + i / 2) / 2;
        *reinterpret_cast<uint32_t*>(panel + offset + threadIdx.x % 4 * 2) = a[k][0][i];
      }
  }

 private:
  // Returns this lane's address for ldmatrix and stmatrix. XOR with k * 32 selects the 16 keys from
  // 16 * k on.
  __device__ __forceinline__ static uint32_t place(uint32_t panel) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
    return panel + Panel::offset(row, lane / 16);
  }
};

// O += P @ V                                                [64, COLUMNS]
// Issues the products of a tile. v: address of its values.
template <class Config, class Weights, class Sum>
__device__ __forceinline__ void multiply_values(Sum& o, Weights& p, uint32_t v) {
  using Tile = typename Config::Tile;
  const uint64_t b_v = Tile::by_columns(uniform(v));
  hold(p.a);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Weights::STEPS; ++k) {
    wgmma<typename Config::T, true>(o.x[0], p.a[k][0], b_v + Tile::columns_step(k));
  }
  wgmma_commit();
}

// Factors for adding a tile, for the two rows of a lane: keep for O of the group, add for P of the
// tile. The constructor raises `top`.
struct TileFactors {
  float keep[2], add[2];

  TileFactors() = default;
  __device__ __forceinline__ TileFactors(float (&top)[2], const float (&tile)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Combine combine(top[h], tile[h]);
      top[h] = combine.top, keep[h] = combine.keep, add[h] = combine.add;
    }
  }
};

// Factors for adding both tiles of a key block, the second one first, for one row.
struct KeyBlockCombine {
  float top, keep, add_first, add_second;

  __device__ __forceinline__ KeyBlockCombine(float before, float first, float second)
      : top(fmaxf(fmaxf(before, first), second)),
        keep(Combine(top, before).add),
        add_first(Combine(top, first).add),
        add_second(Combine(top, second).add) {}
};

// KeyBlockCombine for the two rows of a lane. The constructor raises `top`.
struct KeyBlockFactors {
  float keep[2], add_first[2], add_second[2];

  __device__ __forceinline__ KeyBlockFactors(float (&top)[2], const float (&first)[2],
                                             const float (&second)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const KeyBlockCombine combine(top[h], first[h], second[h]);
      top[h] = combine.top, keep[h] = combine.keep;
      add_first[h] = combine.add_first, add_second[h] = combine.add_second;
    }
  }
};

}  // namespace flash_dist

// How the backward kernels write a gradient.
#pragma once

#include "mma/fragments.cuh"

namespace flash_dist {

// Writes a warp's rows of a gradient, rounded, through its rows of a tile that no other warp uses. With
// Config::SPLIT > 1, `part` is the warp's share, and all warps of the block must call this.
template <class Config, int COLUMNS, int NT>
__device__ __forceinline__ void store_gradient(const Accumulator<Config::ROW_TILES, NT>& c,
                                               uint32_t warp_tile, int part, uint16_t* dst,
                                               int64_t row_stride, int row_limit, int columns) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  if constexpr (Config::SPLIT == 1) {
    store_rows<Target, T, COLUMNS, Config::ROW_TILES>(c, warp_tile, dst, row_stride, row_limit,
                                                      columns);
  } else {
    constexpr int MINE = Config::ROWS / Config::SPLIT;
    stage_rows<Target, T, COLUMNS, Config::SPLIT>(c, warp_tile, part);
    __syncthreads();  // the team has staged its columns
    const int row = part * MINE;
    store_staged<COLUMNS, MINE, 32>(warp_tile + row * COLUMNS * 2, threadIdx.x % 32,
                                    dst + row * row_stride, row_stride, row_limit - row, columns);
  }
}

// f(x, y, place) for each two columns of a lane's part of fp32 rows that exist, and where they lie:
// partial sums of the group split, and sums kept between query chunks.
template <int SPLIT, int MT, int NT, class Sums, class F>
__device__ __forceinline__ void each_partial(Sums& c, float* sums, int row_limit, int part, F f) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + lane / 4;
      if (row < row_limit) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int column = (n / 2 * SPLIT + part) * 16 + n % 2 * 8 + (lane % 4) * 2;
          f(c.x[m][n][2 * h], c.x[m][n][2 * h + 1],
            *reinterpret_cast<float2*>(sums + row * (NT * 8 * SPLIT) + column));
        }
      }
    }
}

template <int SPLIT, int MT, int NT>
__device__ __forceinline__ void store_partial(const Accumulator<MT, NT>& c, float* dst,
                                              int row_limit, int part) {
  each_partial<SPLIT, MT, NT>(c, dst, row_limit, part,
                              [](float x, float y, float2& at) { at = {x, y}; });
}

template <int SPLIT, int MT, int NT>
__device__ __forceinline__ void load_partial(Accumulator<MT, NT>& c, float* src, int row_limit,
                                             int part) {
  each_partial<SPLIT, MT, NT>(c, src, row_limit, part,
                              [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
}

}  // namespace flash_dist

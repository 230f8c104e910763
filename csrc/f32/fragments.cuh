// Helpers of the fp32 kernels for the results of product.cuh: sums over slices, and stores.
#pragma once

#include "core/accumulator.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

// A warp's part of a block's tile: SPLIT warps share ROWS rows. Each has a slice of the columns,
// both for sums over columns and for the results.
template <class Config>
struct WarpPlace {
  int group, slice, lane;

  // Recomputes the thread index, to leave the registers to the accumulators.
  __device__ __forceinline__ WarpPlace() : WarpPlace(fresh_thread()) {}
  __device__ __forceinline__ explicit WarpPlace(int thread)
      : group(thread / 32 / Config::SPLIT), slice(thread / 32 % Config::SPLIT), lane(thread % 32) {}
  __device__ __forceinline__ int row0() const { return group * Config::ROWS; }
  __device__ __forceinline__ int column0() const { return slice * Config::SLICE; }
};

// Adds the SPLIT slices' results of Product::abt(): first pairs of slices, then the pairs' sums.
// The order of a score's sum is the same for any SPLIT and tile (see product.cuh). `exchange` is
// shared memory with room for all groups of SPLIT warps. Call slices_done() between two calls if no
// block barrier separates them.
template <class Config, int MT, int NT>
__device__ __forceinline__ void sum_slices(Accumulator<MT, NT>& c, const WarpPlace<Config>& warp,
                                           uint32_t exchange) {
  if constexpr (Config::SPLIT > 1) {
    constexpr int SLICE_BYTES = MT * NT * 512;
    const uint32_t mine = exchange + warp.group * Config::SPLIT * SLICE_BYTES + warp.lane * 16;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float (&x)[4] = c.x[m][n];
        store_shared_16(mine + warp.slice * SLICE_BYTES + (m * NT + n) * 512,
                        {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                         __float_as_uint(x[3])});
      }
    barrier_sync(1 + warp.group, 32 * Config::SPLIT);  // all slices are stored
    c.clear();
#pragma unroll
    for (int s = 0; s < Config::SPLIT; s += 2)
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const uint4 x = load_shared_16(mine + s * SLICE_BYTES + (m * NT + n) * 512);
          const uint4 y = load_shared_16(mine + (s + 1) * SLICE_BYTES + (m * NT + n) * 512);
          c.x[m][n][0] += __uint_as_float(x.x) + __uint_as_float(y.x);
          c.x[m][n][1] += __uint_as_float(x.y) + __uint_as_float(y.y);
          c.x[m][n][2] += __uint_as_float(x.z) + __uint_as_float(y.z);
          c.x[m][n][3] += __uint_as_float(x.w) + __uint_as_float(y.w);
        }
  }
}

// Waits until all warps of the group have read the slices.
template <class Config>
__device__ __forceinline__ void slices_done(const WarpPlace<Config>& warp) {
  if constexpr (Config::SPLIT > 1) barrier_sync(1 + warp.group, 32 * Config::SPLIT);
}

// Writes factor * c, where c is a result of Product::ab(). dst points at the warp's first row and
// column. Rows from row_limit on and columns from `columns` on are not written.
template <int MT, int OT>
__device__ __forceinline__ void store_floats(const Accumulator<MT, OT>& c, float factor, float* dst,
                                             int64_t row_stride, int row_limit, int columns) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + lane / 4;
      if (row >= row_limit) continue;
      float* out = dst + row * row_stride;
#pragma unroll
      for (int i = 0; i < OT; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = i * 8 + lane % 4 * 8 + e * 4;
          if (column < columns) {
            store_global_16(out + column, {__float_as_uint(c.x[m][i][2 * h + e] * factor),
                                           __float_as_uint(c.x[m][i + 1][2 * h + e] * factor),
                                           __float_as_uint(c.x[m][i + 2][2 * h + e] * factor),
                                           __float_as_uint(c.x[m][i + 3][2 * h + e] * factor)});
          }
        }
    }
}

}  // namespace flash_dist

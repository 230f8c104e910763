// Where the threads of a warpgroup are in a work tile of 64 rows.
#pragma once

namespace flash_dist {

// The rows and columns of a work tile that a thread has, as the accumulators of a warpgroup.
template <class Config_>
struct WarpgroupPlace {
  using Config = Config_;
  int part;      // number of COLUMNS columns, the same for a warp
  int row0 = 0;  // of the block

  // The two rows of this lane, h = 0 or 1, in the work tile and in the block.
  __device__ __forceinline__ int row(int h) const { return row0 + row_of_block(h); }
  __device__ __forceinline__ static int row_of_block(int h) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 +
           8 * h;
  }
  // The first of two neighbouring columns of O in x[0][n].
  __device__ __forceinline__ int column(int n) const {
    return part * Config::COLUMNS + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  }
  // Whether this lane writes top and sum of its rows.
  __device__ __forceinline__ bool writes_stats() const { return part == 0 && threadIdx.x % 4 == 0; }
};

}  // namespace flash_dist

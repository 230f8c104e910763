// The places of the threads of a warpgroup in a work tile of 64 rows.
#pragma once

namespace flash_dist {

// Maps the accumulators of a thread, in the layout of wgmma, to rows and columns of the work tile.
template <class Config_>
struct WarpgroupPlace {
  using Config = Config_;
  int part;      // index of the thread's COLUMNS columns, the same in all lanes
  int row0 = 0;  // first row of the block

  // row: this lane's first or second row (h = 0 or 1) in the work tile. row_of_block: that row,
  // counted from the block's first row.
  __device__ __forceinline__ int row(int h) const { return row0 + row_of_block(h); }
  __device__ __forceinline__ static int row_of_block(int h) {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 +
           8 * h;
  }
  // Returns the first of the two adjacent columns of O in x[0][n].
  __device__ __forceinline__ int column(int n) const {
    return part * Config::COLUMNS + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  }
  // Returns whether this lane writes top and sum of its rows.
  __device__ __forceinline__ bool writes_stats() const { return part == 0 && threadIdx.x % 4 == 0; }
};

}  // namespace flash_dist

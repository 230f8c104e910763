// What a warpgroup does with rows of a tile in shared memory, beside products.
#pragma once

#include "core/accumulator.cuh"
#include "core/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/stages.cuh"

namespace flash_dist {

// Zeros for those of the first ROWS rows that lie outside of `keep`, all PANELS * 64 columns: their
// part of a product counts for nothing, but what was copied may be NaN. By THREADS threads, of which
// this is number `thread`; fence_proxy_async() and a barrier have to follow.
template <class Tile, int ROWS, int PANELS, int THREADS>
__device__ __forceinline__ void clear_rows(uint32_t tile, const RowSpan& keep, int thread) {
  constexpr int CHUNKS = PANELS * 8;  // of 16 bytes to a row
#pragma unroll 1
  for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS;
    if (row < keep.first || row >= keep.end) {
      store_shared_16(tile + Tile::offset(row, i % CHUNKS), {0, 0, 0, 0});
    }
  }
}

// A warpgroup's 64 rows of a sum, rounded, to 64 rows of a tile.
template <class Tile, class Target, class T, int NT>
__device__ __forceinline__ void stage_rows(const Accumulator<1, NT>& c, uint32_t tile) {
  const int lane = fresh_thread() % 32;
  const int row = warp_of_consumer() * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t r[1][4];
    to_a_operand<Target, T>(r, c, k);
    stmatrix_x4(tile + Tile::offset(row, 2 * k + lane / 16), r[0]);
  }
}

// By a warpgroup, from 64 rows of a tile, of NT * 8 columns: the first `rows` rows and `columns`
// columns exist.
template <class Tile, int NT>
__device__ __forceinline__ void copy_rows(uint32_t tile, uint16_t* dst, int64_t row_stride,
                                          int rows, int columns) {
  constexpr int CHUNKS = NT;  // of 16 bytes to a row
#pragma unroll 4
  for (int i = fresh_thread() % WARPGROUP; i < 64 * CHUNKS; i += WARPGROUP) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (row < rows && chunk * 8 < columns) {
      store_global_16(dst + row * row_stride + chunk * 8,
                      load_shared_16(tile + Tile::offset(row, chunk)));
    }
  }
}

// Both, through rows that nobody else uses.
template <class Tile, class Target, class T, int NT>
__device__ __forceinline__ void store_rows(const Accumulator<1, NT>& c, uint32_t tile,
                                           uint16_t* dst, int64_t row_stride, int rows,
                                           int columns) {
  const int barrier = ONE_CONSUMER + consumer();
  barrier_sync(barrier, WARPGROUP);  // all its warps are done with the tile
  stage_rows<Tile, Target, T>(c, tile);
  barrier_sync(barrier, WARPGROUP);
  copy_rows<Tile, NT>(tile, dst, row_stride, rows, columns);
}

}  // namespace flash_dist

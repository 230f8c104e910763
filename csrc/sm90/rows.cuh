// Clears rows of a tile in shared memory, and stores rows of an accumulator to a tile or to global
// memory.
#pragma once

#include "core/accumulator.cuh"
#include "core/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/copy.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/stages.cuh"

namespace flash_dist {

// Zeroes the rows outside `keep` among the first ROWS rows of a tile, in all PANELS * 64 columns.
// Their weight in a product is 0, but a NaN in them would still make the sum NaN. THREADS threads
// call this; `thread` is this thread's index among them. The caller must then call
// fence_proxy_async() and wait at a barrier.
template <class Tile, int ROWS, int PANELS, int THREADS>
__device__ __forceinline__ void clear_rows(uint32_t tile, const RowSpan& keep, int thread) {
  constexpr int CHUNKS = PANELS * 8;  // 16-byte chunks per row
#pragma unroll 1
  for (int i = thread; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS;
    if (row < keep.first || row >= keep.end) {
      store_shared_16(tile + Tile::offset(row, i % CHUNKS), {0, 0, 0, 0});
    }
  }
}

// Rounds a warpgroup's 64 rows of an accumulator, and stores them to 64 rows of a tile.
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

// Transposes registers among the four lanes of a quad: lane i gets register i of each lane, in lane
// order.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4]) {
  const int lane = fresh_thread() % 4;
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool high = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      uint32_t& low_one = r[i];
      uint32_t& high_one = r[i + step];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, high ? low_one : high_one, step);
      (high ? low_one : high_one) = other;
    }
  }
}

// Rounds a warpgroup's 64 rows of an accumulator, and stores the first `columns` columns of the
// first `rows` rows to global memory.
template <class Target, class T, int NT>
__device__ __forceinline__ void store_rows(const Accumulator<1, NT>& c, uint16_t* dst,
                                           int64_t row_stride, int rows, int columns) {
  static_assert(NT % 4 == 0);
  const int lane = fresh_thread() % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_of_consumer() * 16 + h * 8 + lane / 4;
    uint16_t* own = dst + row * row_stride + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < NT; n += 4) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        r[i] = pack<Target, T>(c.x[0][n + i][2 * h], c.x[0][n + i][2 * h + 1]);
      }
      transpose_quad(r);
      if (row < rows && (n + lane % 4) * 8 < columns) {
        store_global_16(own + n * 8, {r[0], r[1], r[2], r[3]});
      }
    }
  }
}

// Copies the first `columns` columns of the first `rows` rows of a tile to global memory. The tile
// has 64 rows and NT * 8 columns.
template <class Tile, int NT>
__device__ __forceinline__ void copy_rows(uint32_t tile, uint16_t* dst, int64_t row_stride,
                                          int rows, int columns) {
  constexpr int CHUNKS = NT;  // 16-byte chunks per row
#pragma unroll 4
  for (int i = fresh_thread() % WARPGROUP; i < 64 * CHUNKS; i += WARPGROUP) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    if (row < rows && chunk * 8 < columns) {
      store_global_16(dst + row * row_stride + chunk * 8,
                      load_shared_16(tile + Tile::offset(row, chunk)));
    }
  }
}

// Like store_rows() above, but stages the rows in a tile, which no other warpgroup may use.
template <class Tile, class Target, class T, int NT>
__device__ __forceinline__ void store_rows(const Accumulator<1, NT>& c, uint32_t tile,
                                           uint16_t* dst, int64_t row_stride, int rows,
                                           int columns) {
  const int barrier = ONE_CONSUMER + consumer();
  barrier_sync(barrier, WARPGROUP);  // all warps have read the tile
  stage_rows<Tile, Target, T>(c, tile);
  barrier_sync(barrier, WARPGROUP);  // all warps have written the tile
  copy_rows<Tile, NT>(tile, dst, row_stride, rows, columns);
}

}  // namespace flash_dist

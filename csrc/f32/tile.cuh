// Tiles of fp32 elements in shared memory. A row of HEAD_DIM floats is laid out, copied and read by
// ldmatrix as the row of 2 * HEAD_DIM 16-bit elements that core/tile.cuh knows: chunk c, 16 bytes
// or 4 floats, of row r lies at chunk c ^ (r % 8).
#pragma once

#include "core/params.h"
#include "core/tile.cuh"
#include "core/views.cuh"

namespace flash_dist {

template <int HEAD_DIM>
struct FloatRows : SwizzledRows<2 * HEAD_DIM> {
  using Base = SwizzledRows<2 * HEAD_DIM>;
  static_assert(Base::CHUNKS % 8 == 0, "the products rely on a phase of row % 8");

  // Address of a row, a multiple of 8, and a column, one of 32: neither changes the phase.
  __device__ __forceinline__ static uint32_t at(uint32_t tile, int row, int column) {
    return tile + row * Base::ROW_BYTES + column * 4;
  }
};

// TileCopy for floats: row_stride and columns in elements, columns a multiple of 4.
template <class Target, int ROWS, int HEAD_DIM, int THREADS>
struct FloatTileCopy {
  TileCopy<Target, ROWS, 2 * HEAD_DIM, THREADS> halves;

  __device__ __forceinline__ void fetch(uint32_t smem, const float* base, int64_t row_stride,
                                        RowSpan rows, int columns) {
    halves.fetch(smem, reinterpret_cast<const uint16_t*>(base), 2 * row_stride, rows, 2 * columns);
  }
  __device__ __forceinline__ void land(uint32_t smem) { halves.land(smem); }
};

__device__ __forceinline__ float* float_head_begin(const View& view, int batch, int head_kv,
                                                   int head_in_group) {
  return head_begin<float>(view, batch, head_kv, head_in_group);
}

}  // namespace flash_dist

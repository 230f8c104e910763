// Tiles of 16-bit elements in shared memory as TMA writes them and wgmma reads them: panels of 64
// columns. A panel has ROWS rows of 128 bytes, whose 16-byte chunks are swizzled by the row. A tile
// starts at a multiple of 1024 bytes, and so does every 8th row.
//
// A tile can be either kind of operand (PTX ISA, "Matrix Descriptor" and "Strides"): K-major, where
// its rows are M or N and its columns k, or MN-major, where its rows are k and its columns M or N.
#pragma once

#include <cstdint>

namespace flash_dist {

// Returns the address, which all lanes of a warp share, as a warp-uniform value. The compiler then
// builds descriptors once per warp in uniform registers, from which wgmma reads them.
__device__ __forceinline__ uint32_t uniform(uint32_t address) {
  return __shfl_sync(0xffffffffu, address, 0);
}

template <int ROWS>
struct Panels {
  static constexpr int COLUMNS = 64;  // columns of a panel
  static constexpr int ROW_BYTES = 2 * COLUMNS;
  static constexpr int BYTES = ROWS * ROW_BYTES;  // bytes of a panel
  static_assert(ROWS % 8 == 0);

  __host__ __device__ static constexpr int count(int columns) {
    return (columns + COLUMNS - 1) / COLUMNS;
  }

  // Returns the byte offset of element 8 * chunk of a row.
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return chunk / 8 * BYTES + row * ROW_BYTES + ((chunk % 8 ^ row % 8) << 4);
  }

  // by_rows: descriptor of the first 16 columns of a tile whose rows are M or N. rows_step: the
  // number to add to the descriptor for column 16 * k.
  __device__ __forceinline__ static uint64_t by_rows(uint32_t tile) { return descriptor(tile, 16); }
  __host__ __device__ static constexpr int rows_step(int k) {
    return (k / 4 * BYTES + k % 4 * 32) >> 4;
  }

  // by_columns: descriptor of the first 16 rows of a tile whose columns are M or N. columns_step:
  // the number to add to the descriptor for row 16 * k.
  __device__ __forceinline__ static uint64_t by_columns(uint32_t tile) {
    return descriptor(tile, BYTES);
  }
  __host__ __device__ static constexpr int columns_step(int k) { return k * 16 * ROW_BYTES >> 4; }

 private:
  // Returns a descriptor of a tile. stride: bytes between panels; ignored if an instruction stays
  // within one panel.
  __device__ __forceinline__ static uint64_t descriptor(uint32_t tile, uint32_t stride) {
    constexpr uint64_t SWIZZLE_128_BYTES = uint64_t{1} << 62;
    constexpr uint64_t EIGHT_ROWS = uint64_t{8 * ROW_BYTES >> 4} << 32;
    return SWIZZLE_128_BYTES | EIGHT_ROWS | uint64_t{stride >> 4} << 16 | (tile & 0x3ffff) >> 4;
  }
};

}  // namespace flash_dist

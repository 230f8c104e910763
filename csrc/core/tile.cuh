// Tiles of 16-bit elements in shared memory: swizzled rows, loads from a strided view, ldmatrix
// operands, stores.
//
// A row of HEAD_DIM elements is HEAD_DIM / 8 chunks of 16 bytes; chunk c of row r lies at chunk c ^
// (r % 8). Eight rows of one chunk column then fall into eight different 16-byte bank groups, for
// the writes of cp.async (one row per quarter warp) and for the reads of ldmatrix (eight rows of
// one column) alike.
#pragma once

#include "core/target.h"
#include "ptx/copy.cuh"
#include "ptx/ldmatrix.cuh"

namespace flash_dist {

// threadIdx.x and blockIdx.x, read again: what is derived from them is computed anew after each
// call instead of being kept in registers between.
__device__ __forceinline__ int fresh_thread() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

__device__ __forceinline__ int fresh_block() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

template <int HEAD_DIM>
struct SwizzledRows {
  static_assert(HEAD_DIM % 64 == 0, "a row must hold a multiple of 8 chunks");
  static constexpr int CHUNKS = HEAD_DIM / 8;
  static constexpr int ROW_BYTES = HEAD_DIM * 2;

  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
  }
};

// Moves [ROWS, HEAD_DIM] from global to swizzled shared memory with all THREADS of the block. Rows
// outside the view are zero-filled and never read. fetch() starts the copy and land() makes it
// visible to the thread itself: on sm_80 and newer fetch() is cp.async and the caller waits for the
// group; before, fetch() loads registers and land() stores them.
template <class Target, int ROWS, int HEAD_DIM, int THREADS>
struct TileCopy {
  using Layout = SwizzledRows<HEAD_DIM>;
  static constexpr int ROWS_PER_PASS = THREADS / Layout::CHUNKS;
  static constexpr int PASSES = ROWS / ROWS_PER_PASS;
  static_assert(ROWS % ROWS_PER_PASS == 0 && ROWS_PER_PASS % 8 == 0,
                "every pass must keep the swizzle phase");

  uint4 staged[Target::HAS_CP_ASYNC ? 1 : PASSES];

  // base points at element 0 of row 0; row_limit rows (may be <= 0) exist.
  __device__ __forceinline__ void fetch(uint32_t smem, const uint16_t* base, int64_t row_stride,
                                        int row_limit) {
    const int thread = fresh_thread();
    const int row = thread / Layout::CHUNKS;
    const int chunk = thread % Layout::CHUNKS;
    const uint16_t* src = base + row * row_stride + chunk * 8;
    const uint32_t dst = smem + Layout::offset(row, chunk);
    // NOTE: one pointer that walks, not PASSES of them: the loop around this must not keep 2 *
    // PASSES registers alive.
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const bool valid = row + i * ROWS_PER_PASS < row_limit;
      if constexpr (Target::HAS_CP_ASYNC) {
        cp_async_16(dst + i * ROWS_PER_PASS * Layout::ROW_BYTES, src, valid);
      } else {
        staged[i] = valid ? load_global_16(src) : uint4{0, 0, 0, 0};
      }
      src += ROWS_PER_PASS * row_stride;
    }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (!Target::HAS_CP_ASYNC) {
      const int thread = fresh_thread();
      const uint32_t dst = smem + Layout::offset(thread / Layout::CHUNKS, thread % Layout::CHUNKS);
#pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        store_shared_16(dst + i * ROWS_PER_PASS * Layout::ROW_BYTES, staged[i]);
      }
    }
  }
};

// Where this lane points ldmatrix at a tile, for the three operand roles. Rows are counted from the
// address's own row 0, which must be a multiple of 8; k and n are multiples of 16.
template <int HEAD_DIM>
struct Operand {
  using Layout = SwizzledRows<HEAD_DIM>;
  uint32_t row;    // address of this lane's row
  uint32_t phase;  // this lane's chunk offset, already swizzled, in bytes

  // A[16 rows, 16 k] of a row-major tile: a[0..3] of mma_m16n8k16.
  __device__ __forceinline__ static Operand a(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    return {tile + (lane % 16) * Layout::ROW_BYTES,
            static_cast<uint32_t>(((lane / 16) ^ (lane % 8)) << 4)};
  }
  // B[16 k, 16 n] where the tile holds rows n: r[0], r[1] are b of columns n..n+7, r[2], r[3] of
  // n+8..n+15.
  __device__ __forceinline__ static Operand b(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    const int r = lane % 8 + (lane / 16) * 8;
    return {tile + r * Layout::ROW_BYTES,
            static_cast<uint32_t>((((lane / 8) % 2) ^ (lane % 8)) << 4)};
  }
  // B[16 k, 16 n] where the tile holds rows k (read transposed); same registers as b.
  __device__ __forceinline__ static Operand b_trans(uint32_t tile) { return a(tile); }

  // A copy whose derived addresses the compiler cannot keep in registers across the enclosing loop.
  __device__ __forceinline__ Operand local() const {
    Operand copy = *this;
    asm volatile("" : "+r"(copy.phase));
    return copy;
  }

  // Address of the 16x16 block whose first row is row0 and first column 16 * col16.
  __device__ __forceinline__ uint32_t at(int row0, int col16) const {
    return row + row0 * Layout::ROW_BYTES + (phase ^ (col16 << 5));
  }
};

}  // namespace flash_dist

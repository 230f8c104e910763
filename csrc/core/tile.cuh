// Tiles of 16-bit elements in shared memory: swizzled rows, how they are filled from strided views,
// and where ldmatrix reads an operand.
//
// A row of HEAD_DIM elements is HEAD_DIM / 8 chunks of 16 bytes. Chunk c of row r lies at chunk
// c ^ phase(r): eight rows of one chunk column then fall into eight different 16-byte bank groups,
// for the writes of cp.async and for the reads of ldmatrix alike. Where a row is a whole number of
// 128-byte lines the phase is r % 8; where it is half a line more, odd rows are already four groups
// away and (r / 2) % 4 does the rest.
#pragma once

#include <type_traits>

#include "ptx/copy.cuh"
#include "ptx/elements.h"
#include "ptx/ldmatrix.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

template <int HEAD_DIM>
struct SwizzledRows {
  static_assert(HEAD_DIM % 32 == 0, "a row must hold a multiple of 4 chunks");
  static constexpr int CHUNKS = HEAD_DIM / 8;
  static constexpr int ROW_BYTES = HEAD_DIM * 2;

  // Period 8 in row.
  __device__ __forceinline__ static int phase(int row) {
    return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3;
  }
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ phase(row)) << 4);
  }
};

// How many neighbouring threads share a row: as many as divide it and leave each pass a multiple of
// 8 rows, so that every pass keeps the swizzle phase.
__host__ __device__ constexpr int lanes_per_row(int chunks, int threads) {
  int lanes = 1;
  while (chunks % (2 * lanes) == 0 && threads / (2 * lanes) >= 8) lanes *= 2;
  return lanes;
}

// Which rows of a tile exist: outside, zeros are stored and nothing is read.
struct RowSpan {
  int first, end;  // end may lie before first: none
};

// Whether tiles on their way wait in registers (before sm_80), or are loaded only when their place
// is free: where the accumulators leave no registers.
template <class Target, int HEAD_DIM>
constexpr bool LOADS_LATE = !Target::HAS_CP_ASYNC && HEAD_DIM > 64 && HEAD_DIM != 128;

// Moves [ROWS, HEAD_DIM] from global to swizzled shared memory with all THREADS of the block. Rows
// outside the span and columns from `columns` on are zero-filled and never read. fetch() starts the
// copy and land() makes it visible to the thread itself: on sm_80 and newer fetch() is cp.async and
// the caller waits for the group; before, fetch() loads registers and land() stores them, or land()
// does both (LOADS_LATE).
template <class Target, int ROWS, int HEAD_DIM, int THREADS>
struct TileCopy {
  using Layout = SwizzledRows<HEAD_DIM>;
  static constexpr int LANES = lanes_per_row(Layout::CHUNKS, THREADS);
  static constexpr int ROWS_PER_PASS = THREADS / LANES;
  static constexpr int PASSES = (ROWS + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
  static constexpr int CHUNKS_PER_THREAD = Layout::CHUNKS / LANES;
  static constexpr bool WHOLE = ROWS % ROWS_PER_PASS == 0;  // else threads of the last rows rest
  static constexpr bool LATE = LOADS_LATE<Target, HEAD_DIM>;
  static constexpr bool STAGED = !Target::HAS_CP_ASYNC && !LATE;
  static_assert(ROWS_PER_PASS % 8 == 0, "every pass must keep the swizzle phase");
  static_assert(WHOLE || PASSES == 1, "only a single pass may be partial");

  uint4 staged[STAGED ? PASSES * CHUNKS_PER_THREAD : 1];
  struct Source {
    const uint16_t* base;
    int64_t row_stride;
    RowSpan rows;
    int columns;
  } late;

  // base points at element 0 of row 0.
  __device__ __forceinline__ void fetch(uint32_t smem, const uint16_t* base, int64_t row_stride,
                                        RowSpan rows, int columns) {
    if constexpr (LATE) {
      late = {base, row_stride, rows, columns};
    } else {
      each<false>({base, row_stride, rows, columns},
                  [&](int offset, const uint16_t* src, bool valid, int i) {
                    if constexpr (STAGED) {
                      staged[i] = valid ? load_global_16(src) : uint4{0, 0, 0, 0};
                    } else {
                      cp_async_16(smem + offset, src, valid);
                    }
                  });
    }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (LATE) {
      each<true>(late, [&](int offset, const uint16_t* src, bool valid, int) {
        store_shared_16(smem + offset, valid ? load_global_16(src) : uint4{0, 0, 0, 0});
      });
    } else if constexpr (STAGED) {
      each<false>({}, [&](int offset, const uint16_t*, bool, int i) {
        store_shared_16(smem + offset, staged[i]);
      });
    }
  }

 private:
  // f(offset in the tile, source, whether it exists, number) for each chunk of this thread.
  template <bool ROLLED, class F>
  __device__ __forceinline__ static void each(const Source& source, F f) {
    const int thread = fresh_thread();
    const int row = thread / LANES;
    const int lane = thread % LANES;
    if (!WHOLE && row >= ROWS) return;
    const uint16_t* src = source.base + row * source.row_stride + lane * 8;
    const int from_first = row - source.rows.first;
    const int rows = max(source.rows.end - source.rows.first, 0);
    // NOTE: one pointer that walks, not PASSES of them: the loop around this must not keep
    // 2 * PASSES registers alive.
#pragma unroll(ROLLED ? 1 : PASSES)
    for (int i = 0; i < PASSES; ++i) {
#pragma unroll
      for (int c = 0; c < CHUNKS_PER_THREAD; ++c) {
        const int chunk = c * LANES + lane;
        const int exist = chunk * 8 < source.columns ? rows : 0;
        f(Layout::offset(row, chunk) + i * ROWS_PER_PASS * Layout::ROW_BYTES, src + c * LANES * 8,
          static_cast<unsigned>(from_first + i * ROWS_PER_PASS) < static_cast<unsigned>(exist),
          i * CHUNKS_PER_THREAD + c);
      }
      src += ROWS_PER_PASS * source.row_stride;
    }
  }
};

// An element as it lies in memory.
template <class T>
using Element =
    std::conditional_t<std::is_same_v<T, Fp16> || std::is_same_v<T, Bf16>, uint16_t, float>;

// TileCopy for the elements of a Config. A row of floats is laid out as one of twice as many 16-bit
// elements. row_stride and columns in elements.
template <class Config, int ROWS, int COLUMNS>
struct OperandCopy {
  using Source = const Element<typename Config::T>*;
  static constexpr int WORDS = sizeof(Element<typename Config::T>) / sizeof(uint16_t);
  TileCopy<typename Config::Target, ROWS, WORDS * COLUMNS, Config::THREADS> words;

  __device__ __forceinline__ void fetch(uint32_t smem, Source first, int64_t row_stride,
                                        RowSpan rows, int columns) {
    words.fetch(smem, reinterpret_cast<const uint16_t*>(first), WORDS * row_stride, rows,
                WORDS * columns);
  }
  __device__ __forceinline__ void land(uint32_t smem) { words.land(smem); }
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
            static_cast<uint32_t>(((lane / 16) ^ Layout::phase(lane)) << 4)};
  }
  // B[16 k, 16 n] where the tile holds rows n: r[0], r[1] are b of the columns n..n+7, r[2], r[3]
  // those of n+8..n+15.
  __device__ __forceinline__ static Operand b(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    const int r = lane % 8 + (lane / 16) * 8;
    return {tile + r * Layout::ROW_BYTES,
            static_cast<uint32_t>((((lane / 8) % 2) ^ Layout::phase(lane)) << 4)};
  }
  // B[32 k, 8 n] where the tile holds rows n: r[0], r[1] are b of the first 16 k, r[2], r[3] of the
  // second; use it with at_32().
  __device__ __forceinline__ static Operand b_8(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    return {tile + (lane % 8) * Layout::ROW_BYTES,
            static_cast<uint32_t>(((lane / 8) ^ Layout::phase(lane)) << 4)};
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
  // Address of the 8x32 block whose first row is row0 and first column 32 * col32.
  __device__ __forceinline__ uint32_t at_32(int row0, int col32) const {
    return row + row0 * Layout::ROW_BYTES + (phase ^ (col32 << 6));
  }
};

}  // namespace flash_dist

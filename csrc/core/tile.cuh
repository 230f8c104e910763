// Tiles of 16-bit elements in shared memory: swizzled rows, copies from strided views, and the
// addresses from which ldmatrix reads operands.
//
// A row of HEAD_DIM elements has HEAD_DIM / 8 chunks of 16 bytes. Chunk c of row r is stored at
// chunk c ^ phase(r). The same chunk of eight rows then falls into eight different 16-byte bank
// groups, for both cp.async writes and ldmatrix reads. If a row is a multiple of 128 bytes, the
// phase is r % 8. If it is 64 bytes more, odd rows are already four bank groups away, and (r / 2) %
// 4 is enough.
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

  // Returns the number that is XORed with the chunk indices of a row. It repeats every 8 rows.
  __device__ __forceinline__ static int phase(int row) {
    return CHUNKS % 8 == 0 ? row & 7 : (row >> 1) & 3;
  }
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ phase(row)) << 4);
  }
};

// Returns how many adjacent threads share a row. The number divides the row's chunks and leaves a
// multiple of 8 rows per pass, so that the swizzle phase is the same in every pass.
__host__ __device__ constexpr int lanes_per_row(int chunks, int threads) {
  int lanes = 1;
  while (chunks % (2 * lanes) == 0 && threads / (2 * lanes) >= 8) lanes *= 2;
  return lanes;
}

// The rows of a tile that exist. The tile's other rows are not read, but filled with zeros.
struct RowSpan {
  int first, end;  // no row exists if end <= first
};

// Before sm_80: true if tiles are loaded only after their stage is free. Otherwise tiles are loaded
// earlier and kept in registers; large accumulators leave no registers for that.
template <class Target, int HEAD_DIM>
constexpr bool LOADS_LATE = !Target::HAS_CP_ASYNC && HEAD_DIM > 64 && HEAD_DIM != 128;

// Copies [ROWS, HEAD_DIM] from global to swizzled shared memory with all THREADS threads. Rows
// outside the span and columns from `columns` on become zeros and are not read. On sm_80 and newer,
// fetch() issues cp.async and the caller waits for the group. Before sm_80, fetch() loads into
// registers and land() stores them, or land() does both (LOADS_LATE).
template <class Target, int ROWS, int HEAD_DIM, int THREADS>
struct TileCopy {
  using Layout = SwizzledRows<HEAD_DIM>;
  static constexpr int LANES = lanes_per_row(Layout::CHUNKS, THREADS);
  static constexpr int ROWS_PER_PASS = THREADS / LANES;
  static constexpr int PASSES = (ROWS + ROWS_PER_PASS - 1) / ROWS_PER_PASS;
  static constexpr int CHUNKS_PER_THREAD = Layout::CHUNKS / LANES;
  static constexpr bool WHOLE = ROWS % ROWS_PER_PASS == 0;  // all threads take part in every pass
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

  // Starts the copy of a tile; if LATE, land() does all of it. base: element 0 of row 0.
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
  // Calls f(offset in the tile, source address, whether the source exists, index) for each chunk of
  // this thread.
  template <bool ROLLED, class F>
  __device__ __forceinline__ static void each(const Source& source, F f) {
    const int thread = fresh_thread();
    const int row = thread / LANES;
    const int lane = thread % LANES;
    if (!WHOLE && row >= ROWS) return;
    const uint16_t* src = source.base + row * source.row_stride + lane * 8;
    const int from_first = row - source.rows.first;
    const int rows = max(source.rows.end - source.rows.first, 0);
    // NOTE: a single pointer advances, because PASSES pointers would occupy 2 * PASSES registers in
    // the enclosing loop.
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

// The storage type of an element.
template <class T>
using Element =
    std::conditional_t<std::is_same_v<T, Fp16> || std::is_same_v<T, Bf16>, uint16_t, float>;

// TileCopy for the elements of a Config. A row of floats is laid out as a row of twice as many
// 16-bit elements. row_stride and columns are in elements.
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

// The address from which this lane's ldmatrix reads operand A or B of a tile into registers r.
// `tile` is the address of a row whose index is a multiple of 8. at() and at_32() count row0 from
// that row; row0 is a multiple of 8, too.
template <int HEAD_DIM>
struct Operand {
  using Layout = SwizzledRows<HEAD_DIM>;
  uint32_t row;    // address of this lane's row
  uint32_t phase;  // this lane's chunk offset, already swizzled, in bytes

  // A[16 rows, 16 k] of a row-major tile: r[0..3] are a[0..3] of mma_m16n8k16.
  __device__ __forceinline__ static Operand a(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    return {tile + (lane % 16) * Layout::ROW_BYTES,
            static_cast<uint32_t>(((lane / 16) ^ Layout::phase(lane)) << 4)};
  }
  // B[16 k, 16 n], where the rows of the tile are n: r[0], r[1] are b of columns 0 to 7, and r[2],
  // r[3] are b of columns 8 to 15.
  __device__ __forceinline__ static Operand b(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    const int r = lane % 8 + (lane / 16) * 8;
    return {tile + r * Layout::ROW_BYTES,
            static_cast<uint32_t>((((lane / 8) % 2) ^ Layout::phase(lane)) << 4)};
  }
  // B[32 k, 8 n], where the rows of the tile are n: r[0], r[1] are b of the first 16 k, and r[2],
  // r[3] of the second 16. Use it with at_32().
  __device__ __forceinline__ static Operand b_8(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    return {tile + (lane % 8) * Layout::ROW_BYTES,
            static_cast<uint32_t>(((lane / 8) ^ Layout::phase(lane)) << 4)};
  }
  // B[16 k, 16 n], where the rows of the tile are k (read transposed). Same registers as b.
  __device__ __forceinline__ static Operand b_trans(uint32_t tile) { return a(tile); }

  // Returns a copy that keeps the compiler from holding derived addresses in registers across the
  // loop.
  __device__ __forceinline__ Operand local() const {
    Operand copy = *this;
    asm volatile("" : "+r"(copy.phase));
    return copy;
  }

  // Returns the address of the 16x16 block whose first row is row0 and first column 16 * col16.
  __device__ __forceinline__ uint32_t at(int row0, int col16) const {
    return row + row0 * Layout::ROW_BYTES + (phase ^ (col16 << 5));
  }
  // Returns the address of the 8x32 block whose first row is row0 and first column 32 * col32.
  __device__ __forceinline__ uint32_t at_32(int row0, int col32) const {
    return row + row0 * Layout::ROW_BYTES + (phase ^ (col32 << 6));
  }
};

}  // namespace flash_dist

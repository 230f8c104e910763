// Copies of biases that no tensor map describes, because their rows do not begin at multiples of 16
// bytes. The result is laid out as by TMA. BIAS_WARPS warps copy a panel, each 8 rows at a time.
//
// start() copies one row per instruction, a word of 4 bytes per lane. The copies are asynchronous,
// so that many are in flight without registers for them. A row of 16-bit numbers may begin within a
// word. Then its words are copied from the second number on, and the first number waits in a
// register. finish() moves such a row by one number.
//
// On an H200, a row takes 14 cycles of a multiprocessor, whatever the number of warps. Loads of 4 or
// 16 bytes into registers are slower: the registers hold too few rows.
#pragma once

#include "core/panels.cuh"
#include "ptx/copy.cuh"
#include "ptx/copy_words.cuh"
#include "ptx/registers.cuh"
#include "sm90/bias.cuh"

namespace flash_dist {

// Warps that copy a bias: a warpgroup, and the three warps beside that of the loading thread. Fewer
// move rows too slowly.
constexpr int BIAS_WARPS = 7;

// Rows of a panel. from: address of the first row; row_bytes: distance of rows. Of a row, `bytes`
// bytes exist; if there are less than 128, the others get any values.
struct BiasRows {
  const uint8_t* from;
  int64_t row_bytes;
  int rows, bytes;

  // Returns whether a row begins within a word.
  __device__ __forceinline__ bool is_odd(int row) const {
    return begins_within_word(from, row, row_bytes);
  }
};

// The copy of a panel. All lanes of BIAS_WARPS warps call its functions. warp: a number of this
// warp, 0 to BIAS_WARPS - 1. IS_FP32: rows begin at words.
template <class Tile, bool IS_FP32>
struct BiasPanelCopy {
  static constexpr int AT_ONCE = 8;  // rows; the period of the swizzle
  static constexpr int STEP = BIAS_WARPS * AT_ONCE;
  static_assert(Tile::ROW_BYTES == 32 * 4);

  uint32_t tile;  // address of the panel in shared memory
  int warp;
  BiasRows rows;

  // Starts the copies. Returns the first number of the warp's i-th row, in lane i, if any row begins
  // within a word.
  __device__ __forceinline__ uint32_t start() const {
    constexpr int ROUNDS = (Tile::BYTES / Tile::ROW_BYTES + STEP - 1) / STEP;
    static_assert(ROUNDS * AT_ONCE <= 32);
    const int lane = lane_of_warp();
    // The last word of a row that begins within a word ends behind 128 bytes.
    const int whole = rows.bytes > Tile::ROW_BYTES ? rows.rows - AT_ONCE : -1;
    // Numbers begin at even addresses: the word from `at` - 2 on, or that behind it.
    const uint8_t* at = rows.from + first_row() * rows.row_bytes + 4 * lane + 2;
#pragma unroll 1
    for (int row0 = first_row(); row0 < rows.rows; row0 += STEP, at += STEP * rows.row_bytes) {
      if (row0 <= whole) {
        copy_rows<true>(row0, lane, at);
      } else {
        copy_rows<false>(row0, lane, at);
      }
    }
    if constexpr (IS_FP32) return 0;
    const int row = first_row() + lane / AT_ONCE * STEP + lane % AT_ONCE;
    if (row >= rows.rows || rows.bytes <= 0) return 0;
    const uint8_t* own = rows.from + row * rows.row_bytes;
    const int copied = rows.bytes - (rows.is_odd(row) ? 2 : 0);
    if (rows.bytes <= Tile::ROW_BYTES && copied % 4 != 0) {  // the last word is half behind the row
      store_shared_4(word(row, copied / 4), load_constant_2(own + rows.bytes - 2));
    }
    return rows.is_odd(row) ? load_constant_2(own) : 0;
  }

  // Moves the rows that begin within a word. The copies of this warp have landed.
  __device__ __forceinline__ void finish(uint32_t first_numbers) const {
    if constexpr (IS_FP32) return;
    const bool even = rows.is_odd(0), odd = rows.is_odd(1);
    if (even && odd) {
      move_rows<1>(first_numbers, 0);
    } else if (even || odd) {
      move_rows<2>(first_numbers, odd ? 1 : 0);
    }
  }

 private:
  __device__ __forceinline__ static int lane_of_warp() { return fresh_thread() % 32; }
  __device__ __forceinline__ int first_row() const { return warp * AT_ONCE; }
  // Returns the address of a lane's word in a row.
  __device__ __forceinline__ uint32_t word(int row, unsigned lane) const {
    return tile + Tile::offset(row, lane / 4) + lane % 4 * 4;
  }
  // Returns the address of the same lane's word i rows further on, in the same 8 rows. `word`: in a
  // row whose index has no bit in common with i.
  __device__ __forceinline__ static uint32_t further(uint32_t word, int i) {
    return (word ^ i << 4) + i * Tile::ROW_BYTES;
  }

  template <bool WHOLE>
  __device__ __forceinline__ void copy_rows(int row0, int lane, const uint8_t* at) const {
    const uint32_t to = word(row0, lane);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i, at += rows.row_bytes) {
      const auto address = reinterpret_cast<uintptr_t>(at);
      const auto* source = reinterpret_cast<const uint8_t*>(address & ~uintptr_t{3});
      const uint32_t target = further(to, i);
      if constexpr (WHOLE) {
        cp_async_4(target, source);
      } else {
        const int first = 4 * lane + 2 - static_cast<int>(address & 2);
        const bool exists = row0 + i < rows.rows && first < rows.bytes;
        // start() stores a word of which only a half exists.
        if (IS_FP32 || first + 2 != rows.bytes) cp_async_4(target, source, exists);
      }
    }
  }

  // Moves the rows APART apart, from row `first` on.
  template <int APART>
  __device__ __forceinline__ void move_rows(uint32_t first_numbers, int first) const {
    constexpr int AT_A_TIME = 4;
    const int lane = lane_of_warp();
    int order = first;  // of the row among the rows of the warp
#pragma unroll 1
    for (int row0 = first_row(); row0 < rows.rows; row0 += STEP, order += AT_ONCE) {
#pragma unroll
      for (int i0 = 0; i0 < AT_ONCE; i0 += AT_A_TIME * APART) {
        const uint32_t own = further(word(row0 + first, lane), i0);
        uint32_t x[AT_A_TIME];
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) {
          x[i] = load_shared_4(further(own, i * APART));
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) {
          const uint32_t first_number =
              __shfl_sync(0xffffffffu, first_numbers, order + i0 + i * APART);
          const uint32_t before = __shfl_up_sync(0xffffffffu, x[i], 1);
          x[i] = (lane > 0 ? before >> 16 : first_number) | x[i] << 16;
        }
#pragma unroll
        for (int i = 0; i < AT_A_TIME; ++i) {
          store_shared_4(further(own, i * APART), x[i]);
        }
      }
    }
  }
};

}  // namespace flash_dist

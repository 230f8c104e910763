// The two products of the fp32 kernels, on a warp's fragments. If the target has TF32, tensor cores
// compute each as three TF32 products of high and low parts. Otherwise, and for Ieee32, FFMA
// computes them. Below, g is lane / 4, and t is lane % 4.
//
//   abt   C += A @ B^T   A, B row-major in shared memory. C[m][n] is the d fragment of m16n8k8:
//                        rows g and g + 8 of row tile m, columns 2t and 2t + 1 of column tile n.
//   ab    C += P @ B     P is an abt result in registers, B row-major in shared memory.
//
// NOTE: forward, dQ and dK/dV all compute S. With large scores P depends on the last bits of S, and
// lse, out and delta of one kernel must match the P of another. So all of them sum a score in the
// same order for any tile size: blocks of SUM_COLUMNS columns first, then the blocks in pairs
// (scores() adds two, sum_slices() of fragments.cuh more). Products with the low part of a query
// come before those with the low part of a key; QUERIES says which operand has the queries.
//
// The result of ab has permuted columns, so that a lane reads and holds whole 16-byte chunks:
// element [m][4 * i + j][2 * h + e] is row m * 16 + h * 8 + g, column 32 * i + 8 * t + 4 * e + j.
#pragma once

#include <type_traits>

#include "core/accumulator.cuh"
#include "core/tile.cuh"
#include "ptx/mma.cuh"

namespace flash_dist {

// A tile of fp32 elements in shared memory. A row of HEAD_DIM floats is laid out, copied and read
// by ldmatrix like a row of 2 * HEAD_DIM 16-bit elements (core/tile.cuh). Chunk c (16 bytes, 4
// floats) of row r is stored at chunk c ^ (r % 8).
template <int HEAD_DIM>
struct FloatRows : SwizzledRows<2 * HEAD_DIM> {
  using Base = SwizzledRows<2 * HEAD_DIM>;
  static_assert(Base::CHUNKS % 8 == 0, "the products rely on a phase of row % 8");

  // Address of the element at `row` and `column`, as the start of a smaller tile. row must be a
  // multiple of 8 and column a multiple of 32, so that the swizzle phase stays the same.
  __device__ __forceinline__ static uint32_t at(uint32_t tile, int row, int column) {
    return tile + row * Base::ROW_BYTES + column * 4;
  }
};

constexpr int SUM_COLUMNS = 64;

enum class Queries { A, B };

// NOTE: tensor cores truncate sums instead of rounding, and the error grows over hundreds of
// columns and thousands of keys. So they compute only short sums: over 16 columns of a score, or
// over one tile of keys or queries of a result.
struct TensorProduct {
  // c += A @ B^T over SUM_COLUMNS columns.
  template <int HEAD_DIM, int UNROLL, Queries QUERIES, int MT, int NT>
  __device__ __forceinline__ static void abt(Accumulator<MT, NT>& c, uint32_t a, uint32_t b) {
    // Addresses as in Operand::a, b and b_8. There a step has 16 16-bit elements, here 8 floats.
    // The addresses are recomputed in each call, to leave the registers to the accumulators.
    constexpr int ROW_BYTES = FloatRows<HEAD_DIM>::ROW_BYTES;
    using Floats = Operand<2 * HEAD_DIM>;
    const int lane = fresh_thread() % 32;
    const auto rows = [&](uint32_t tile, int row, int chunk) {
      return Floats{tile + row * ROW_BYTES, static_cast<uint32_t>((chunk ^ lane % 8) << 4)};
    };
    const Floats a_rows = rows(a, lane % 16, lane / 16);
    const Floats b_rows =
        NT == 1 ? rows(b, lane % 8, lane / 8) : rows(b, lane % 8 + lane / 16 * 8, lane / 8 % 2);
    uint32_t b_pair[4];       // NT = 1: B of two steps
    Accumulator<MT, NT> sum;  // A @ B^T over two steps
#pragma unroll UNROLL
    for (int k = 0; k < SUM_COLUMNS / 8; ++k) {
      uint32_t b_high[NT][2], b_low[NT][2];
      if constexpr (NT == 1) {
        if (k % 2 == 0) ldmatrix_x4(b_pair, b_rows.at_32(0, k / 2));
        split_b(b_high[0], b_low[0], b_pair[k % 2 * 2], b_pair[k % 2 * 2 + 1]);
      } else {
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
          uint32_t x[4];
          ldmatrix_x4(x, b_rows.at(n * 8, k));
          split_b(b_high[n], b_low[n], x[0], x[1]);
          split_b(b_high[n + 1], b_low[n + 1], x[2], x[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t x[4], a_high[4], a_low[4];
        ldmatrix_x4(x, a_rows.at(m * 16, k));
#pragma unroll
        for (int i = 0; i < 4; ++i) split_tf32(a_high[i], a_low[i], x[i]);
        multiply<QUERIES>(sum.x[m], a_high, a_low, b_high, b_low, k % 2 == 0);
      }
      if (k % 2 == 1) c.add(sum);
    }
  }

  // P's columns 2t and 2t + 1 of a column tile serve as columns t and t + 4 of A. The rows of B are
  // permuted in the same way; the order of the sum does not matter.
  template <int HEAD_DIM, int MT, int NT, int OT>
  __device__ __forceinline__ static void ab(Accumulator<MT, OT>& c, const Accumulator<MT, NT>& p,
                                            uint32_t b) {
    constexpr int ROW_BYTES = FloatRows<HEAD_DIM>::ROW_BYTES;
    const int lane = fresh_thread() % 32;
    const int row = lane % 4 * 2;
    const uint32_t even = b + FloatRows<HEAD_DIM>::offset(row, lane / 4);
    const uint32_t odd = b + FloatRows<HEAD_DIM>::offset(row + 1, lane / 4);
#pragma unroll
    for (int i = 0; i < OT; i += 4) {
      Accumulator<MT, 4> sum;  // P @ B over one tile
#pragma unroll
      for (int k = 0; k < NT; ++k) {
        const uint4 x = load_shared_16(even + k * 8 * ROW_BYTES + i * 32);
        const uint4 y = load_shared_16(odd + k * 8 * ROW_BYTES + i * 32);
        uint32_t b_high[4][2], b_low[4][2];
        split_b(b_high[0], b_low[0], x.x, y.x);
        split_b(b_high[1], b_low[1], x.y, y.y);
        split_b(b_high[2], b_low[2], x.z, y.z);
        split_b(b_high[3], b_low[3], x.w, y.w);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          uint32_t a_high[4], a_low[4];
          split_p(a_high, a_low, p.x[m][k]);
          multiply<Queries::A>(sum.x[m], a_high, a_low, b_high, b_low, k == 0);
        }
      }
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) c.x[m][i + j][e] += sum.x[m][j][e];
    }
  }

 private:
  __device__ __forceinline__ static void split_b(uint32_t (&high)[2], uint32_t (&low)[2],
                                                 uint32_t x, uint32_t y) {
    split_tf32(high[0], low[0], x);
    split_tf32(high[1], low[1], y);
  }
  // Splits P into high and low parts. Columns 2t and 2t + 1 of P become columns t and t + 4 of A.
  __device__ __forceinline__ static void split_p(uint32_t (&high)[4], uint32_t (&low)[4],
                                                 const float (&d)[4]) {
    split_tf32(high[0], low[0], __float_as_uint(d[0]));
    split_tf32(high[1], low[1], __float_as_uint(d[2]));
    split_tf32(high[2], low[2], __float_as_uint(d[1]));
    split_tf32(high[3], low[3], __float_as_uint(d[3]));
  }

  // c = A @ B for the first product of a sum, else c += A @ B. Leaves out low * low, which is at
  // most 2^-22 of the product, with either sign.
  template <Queries QUERIES, int NT, int CT>
  __device__ __forceinline__ static void multiply(float (&c)[CT][4], const uint32_t (&a_high)[4],
                                                  const uint32_t (&a_low)[4],
                                                  const uint32_t (&b_high)[NT][2],
                                                  const uint32_t (&b_low)[NT][2], bool first) {
    static_assert(NT == CT);
    constexpr bool A_FIRST = QUERIES == Queries::A;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint32_t (&a)[4] = A_FIRST ? a_low : a_high;
      const uint32_t (&b)[2] = A_FIRST ? b_high[n] : b_low[n];
      first ? mma_m16n8k8_tf32_first(c[n], a, b) : mma_m16n8k8_tf32(c[n], a, b);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      mma_m16n8k8_tf32(c[n], A_FIRST ? a_high : a_low, A_FIRST ? b_low[n] : b_high[n]);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) mma_m16n8k8_tf32(c[n], a_high, b_high[n]);
  }
};

// The products of TensorProduct, computed with FFMA. Each lane computes its own elements.
struct ScalarProduct {
  template <int HEAD_DIM, int UNROLL, Queries, int MT, int NT>
  __device__ __forceinline__ static void abt(Accumulator<MT, NT>& c, uint32_t a, uint32_t b) {
    constexpr int ROW_BYTES = FloatRows<HEAD_DIM>::ROW_BYTES;
    const int lane = fresh_thread() % 32;
    // The lane's rows are g + 8 * i of A and 2t + e + 8 * n of B: their phases are g and 2t + e.
    const uint32_t a_row = a + lane / 4 * ROW_BYTES;
    const uint32_t b_row = b + lane % 4 * 2 * ROW_BYTES;
    const int a_phase = lane / 4 << 4;
    const int b_phase = lane % 4 * 2 << 4;
#pragma unroll UNROLL
    for (int chunk = 0; chunk < SUM_COLUMNS / 4; ++chunk) {
      float4 rows[MT][2];
#pragma unroll
      for (int i = 0; i < 2 * MT; ++i) {
        rows[i / 2][i % 2] = load(a_row + i * 8 * ROW_BYTES + (a_phase ^ (chunk << 4)));
      }
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float4 y = load(b_row + (n * 8 + e) * ROW_BYTES + (b_phase ^ ((chunk ^ e) << 4)));
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float4& x = rows[m][h];
              float& sum = c.x[m][n][2 * h + e];
              sum = fmaf(x.x, y.x, sum);
              sum = fmaf(x.y, y.y, sum);
              sum = fmaf(x.z, y.z, sum);
              sum = fmaf(x.w, y.w, sum);
            }
        }
    }
  }

  template <int HEAD_DIM, int MT, int NT, int OT>
  __device__ __forceinline__ static void ab(Accumulator<MT, OT>& c, const Accumulator<MT, NT>& p,
                                            uint32_t b) {
    constexpr int ROW_BYTES = FloatRows<HEAD_DIM>::ROW_BYTES;
    const int lane = fresh_thread() % 32;
    const int first_chunk = lane % 4 * 2 << 4;
#pragma unroll
    for (int k = 0; k < NT; ++k)
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        // Column r of the tile is in the lane with t = r / 2.
        float factor[MT][2];
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            factor[m][h] = __shfl_sync(0xffffffffu, p.x[m][k][2 * h + r % 2], lane / 4 * 4 + r / 2);
          }
        const uint32_t row = b + (k * 8 + r) * ROW_BYTES;
#pragma unroll
        for (int i = 0; i < OT; i += 4)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float4 y = load(row + i * 32 + (first_chunk ^ ((e ^ r) << 4)));
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const int x = 2 * h + e;
                c.x[m][i][x] = fmaf(factor[m][h], y.x, c.x[m][i][x]);
                c.x[m][i + 1][x] = fmaf(factor[m][h], y.y, c.x[m][i + 1][x]);
                c.x[m][i + 2][x] = fmaf(factor[m][h], y.z, c.x[m][i + 2][x]);
                c.x[m][i + 3][x] = fmaf(factor[m][h], y.w, c.x[m][i + 3][x]);
              }
          }
      }
  }

 private:
  __device__ __forceinline__ static float4 load(uint32_t smem) {
    const uint4 x = load_shared_16(smem);
    return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
  }
};

template <class Target, class T>
struct Product {
  using Unit = std::conditional_t<Target::HAS_CP_ASYNC && std::is_same_v<T, Fp32>, TensorProduct,
                                  ScalarProduct>;

  // Adds A @ B^T to c. a and b are the addresses of the warp's first row of A and of the first row
  // of B. Both point at the first of COLUMNS columns; a row has HEAD_DIM columns.
  template <int HEAD_DIM, int COLUMNS, int UNROLL, Queries QUERIES, int MT, int NT>
  __device__ __forceinline__ static void abt(Accumulator<MT, NT>& c, uint32_t a, uint32_t b) {
    static_assert(COLUMNS % SUM_COLUMNS == 0);
#pragma unroll
    for (int i = 0; i < COLUMNS; i += SUM_COLUMNS) {
      Unit::template abt<HEAD_DIM, UNROLL, QUERIES>(c, a + i * 4, b + i * 4);
    }
  }

  // Adds A @ B^T to c like abt(), but in the order of summation that all kernels use for S. c must
  // be cleared.
  template <int HEAD_DIM, int COLUMNS, int UNROLL, Queries QUERIES, int MT, int NT>
  __device__ __forceinline__ static void scores(Accumulator<MT, NT>& c, uint32_t a, uint32_t b) {
    static_assert(COLUMNS == SUM_COLUMNS || COLUMNS == 2 * SUM_COLUMNS);
    abt<HEAD_DIM, SUM_COLUMNS, UNROLL, QUERIES>(c, a, b);
    if constexpr (COLUMNS > SUM_COLUMNS) {
      Accumulator<MT, NT> second;
      second.clear();
      abt<HEAD_DIM, SUM_COLUMNS, UNROLL, QUERIES>(second, a + SUM_COLUMNS * 4, b + SUM_COLUMNS * 4);
      c.add(second);
    }
  }

  template <int HEAD_DIM, int MT, int NT, int OT>
  __device__ __forceinline__ static void ab(Accumulator<MT, OT>& c, const Accumulator<MT, NT>& p,
                                            uint32_t b) {
    Unit::template ab<HEAD_DIM>(c, p, b);
  }
};

}  // namespace flash_dist

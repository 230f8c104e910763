// Steps shared by the mma.sync kernels, on the fragments of one warp. MT counts 16-row tiles, NT
// 8-column tiles.
#pragma once

#include "core/tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

namespace flash_dist {

template <int MT, int NT>
struct Accumulator {
  float x[MT][NT][4];

  __device__ __forceinline__ void scale(float factor) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] *= factor;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] = 0.0f;
  }
};

// C[16 * MT, 8 * NT] += A @ B^T with A rows a_row0.. and B rows b_row0.. of two [*, HEAD_DIM] tiles
// in shared memory. UNROLL bounds how far ahead ptxas loads: 4 steps are 1 to 11 % faster than 2,
// where the registers suffice.
template <class Target, class T, int HEAD_DIM, int UNROLL, int MT, int NT>
__device__ __forceinline__ void gemm_abt(Accumulator<MT, NT>& c, Operand<HEAD_DIM> a,
                                         Operand<HEAD_DIM> b, int b_row0) {
  a = a.local();
  b = b.local();
#pragma unroll UNROLL
  for (int k = 0; k < HEAD_DIM / 16; ++k) {
    uint32_t a_frag[MT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m) ldmatrix_x4(a_frag[m], a.at(m * 16, k));
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t b_frag[4];
      ldmatrix_x4(b_frag, b.at(b_row0 + n * 8, k));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        mma_m16n8k16<Target, T>(c.x[m][n], a_frag[m], b_frag[0], b_frag[1]);
        mma_m16n8k16<Target, T>(c.x[m][n + 1], a_frag[m], b_frag[2], b_frag[3]);
      }
    }
  }
}

// C[16 * MT, HEAD_DIM] += A[16 * MT, 16] @ B[16, HEAD_DIM] with A in registers and B the 16 rows
// b_row0.. of a tile.
template <class Target, class T, int HEAD_DIM, int MT>
__device__ __forceinline__ void gemm_ab_step(Accumulator<MT, HEAD_DIM / 8>& c,
                                             const uint32_t (&a)[MT][4], Operand<HEAD_DIM> b_trans,
                                             int b_row0) {
  b_trans = b_trans.local();
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 8; n += 2) {
    uint32_t b_frag[4];
    ldmatrix_x4_trans(b_frag, b_trans.at(b_row0, n / 2));
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      mma_m16n8k16<Target, T>(c.x[m][n], a[m], b_frag[0], b_frag[1]);
      mma_m16n8k16<Target, T>(c.x[m][n + 1], a[m], b_frag[2], b_frag[3]);
    }
  }
}

// Columns 16 * k16 .. of an accumulator, rounded: the A operand of the next product.
template <class Target, class T, int MT, int NT>
__device__ __forceinline__ void to_a_operand(uint32_t (&a)[MT][4], const Accumulator<MT, NT>& c,
                                             int k16) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const float (&left)[4] = c.x[m][2 * k16];
    const float (&right)[4] = c.x[m][2 * k16 + 1];
    a[m][0] = pack<Target, T>(left[0], left[1]);
    a[m][1] = pack<Target, T>(left[2], left[3]);
    a[m][2] = pack<Target, T>(right[0], right[1]);
    a[m][3] = pack<Target, T>(right[2], right[3]);
  }
}

// Rounds this warp's accumulator and stores its rows to global memory with 128-bit accesses,
// through the warp's own rows of a swizzled tile (nobody else may be using them). dst points at the
// warp's first row.
template <class Target, class T, int HEAD_DIM, int MT>
__device__ __forceinline__ void store_rows(const Accumulator<MT, HEAD_DIM / 8>& c,
                                           uint32_t warp_tile, uint16_t* dst, int64_t row_stride,
                                           int row_limit) {
  using Layout = SwizzledRows<HEAD_DIM>;
  const int lane = threadIdx.x % 32;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      const int row = m * 16 + lane / 4;
      store_shared_4(warp_tile + Layout::offset(row, n) + (lane % 4) * 4,
                     pack<Target, T>(c.x[m][n][0], c.x[m][n][1]));
      store_shared_4(warp_tile + Layout::offset(row + 8, n) + (lane % 4) * 4,
                     pack<Target, T>(c.x[m][n][2], c.x[m][n][3]));
    }
  __syncwarp();
  constexpr int ROWS_PER_PASS = 32 / Layout::CHUNKS;
  static_assert(32 % Layout::CHUNKS == 0, "a warp stores whole rows");
  const int chunk = lane % Layout::CHUNKS;
#pragma unroll
  for (int i = 0; i < MT * 16 / ROWS_PER_PASS; ++i) {
    const int row = i * ROWS_PER_PASS + lane / Layout::CHUNKS;
    if (row < row_limit) {
      store_global_16(dst + row * row_stride + chunk * 8,
                      load_shared_16(warp_tile + Layout::offset(row, chunk)));
    }
  }
}

}  // namespace flash_dist

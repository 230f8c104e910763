// Helpers of the mma.sync kernels for a warp's fragments: matrix products, operands, stores.
#pragma once

#include "core/accumulator.cuh"
#include "core/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

namespace flash_dist {

constexpr int FRAGMENT_BYTES = 32 * 16;  // an A operand of 16 rows and 16 columns

// C[16 * MT, 8 * NT] += A @ B^T. A and B are rows of [*, HEAD_DIM] tiles in shared memory: those of
// A from row 0 of `a` on, those of B from row b_row0 of `b` on. b is Operand::b, or Operand::b_8 if
// NT = 1. UNROLL limits how far ahead ptxas loads: 4 steps are 1 to 11 % faster than 2, if the
// registers suffice.
template <class Target, class T, int HEAD_DIM, int UNROLL, int MT, int NT>
__device__ __forceinline__ void gemm_abt(Accumulator<MT, NT>& c, Operand<HEAD_DIM> a,
                                         Operand<HEAD_DIM> b, int b_row0) {
  a = a.local();
  b = b.local();
  if constexpr (NT == 1) {
#pragma unroll UNROLL
    for (int k = 0; k < HEAD_DIM / 32; ++k) {
      uint32_t b_frag[4];
      ldmatrix_x4(b_frag, b.at_32(b_row0, k));
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        uint32_t a_frag[4];
        ldmatrix_x4(a_frag, a.at(m * 16, 2 * k));
        mma_m16n8k16<Target, T>(c.x[m][0], a_frag, b_frag[0], b_frag[1]);
        ldmatrix_x4(a_frag, a.at(m * 16, 2 * k + 1));
        mma_m16n8k16<Target, T>(c.x[m][0], a_frag, b_frag[2], b_frag[3]);
      }
    }
  } else {
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
}

// C += A @ B. A[16 * MT, 16] is in registers, B is 16 rows of a tile from b_row0 on. SPLIT warps
// share the columns: this warp has every SPLIT-th block of 16 columns, NT / 2 blocks in all.
// b_trans: the result of share() for this warp.
template <class Target, class T, int HEAD_DIM, int SPLIT = 1, int MT, int NT>
__device__ __forceinline__ void gemm_ab_step(Accumulator<MT, NT>& c, const uint32_t (&a)[MT][4],
                                             Operand<HEAD_DIM> b_trans, int b_row0) {
  static_assert(NT * 8 * SPLIT == HEAD_DIM);
  b_trans = b_trans.local();
#pragma unroll
  for (int n = 0; n < NT; n += 2) {
    uint32_t b_frag[4];
    ldmatrix_x4_trans(b_frag, b_trans.at(b_row0, n / 2 * SPLIT));
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      mma_m16n8k16<Target, T>(c.x[m][n], a[m], b_frag[0], b_frag[1]);
      mma_m16n8k16<Target, T>(c.x[m][n + 1], a[m], b_frag[2], b_frag[3]);
    }
  }
}

// Returns the operand of the warp that owns the 16-column blocks `number`, `number` + SPLIT, ...
template <int HEAD_DIM>
__device__ __forceinline__ Operand<HEAD_DIM> share(Operand<HEAD_DIM> b_trans, int number) {
  return {b_trans.row, b_trans.phase ^ (number << 5)};
}

// Rounds this warp's columns of MT 16-row tiles and stores them as A fragments of 16 columns. A
// fragment has FRAGMENT_BYTES, a tile has BLOCKS fragments. at: this lane's address in fragment 0.
// share: index of the warp's part of the columns.
template <class Target, class T, int BLOCKS, int MT, int NT>
__device__ __forceinline__ void put_fragments(uint32_t at, const Accumulator<MT, NT>& c,
                                              int share) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    if constexpr (NT == 1) {  // the warp has only half of a fragment's columns
      store_shared_8(at + (m * BLOCKS + share / 2) * FRAGMENT_BYTES + share % 2 * 8,
                     pack<Target, T>(c.x[m][0][0], c.x[m][0][1]),
                     pack<Target, T>(c.x[m][0][2], c.x[m][0][3]));
    } else {
#pragma unroll
      for (int k = 0; k < NT / 2; ++k) {
        uint32_t r[MT][4];
        to_a_operand<Target, T>(r, c, k);
        store_shared_16(at + (m * BLOCKS + share * (NT / 2) + k) * FRAGMENT_BYTES,
                        {r[m][0], r[m][1], r[m][2], r[m][3]});
      }
    }
  }
}

__device__ __forceinline__ void get_fragment(uint32_t (&r)[4], uint32_t at) {
  const uint4 x = load_shared_16(at);
  r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}

// Barrier for the SPLIT adjacent warps of a team.
template <class Config>
__device__ __forceinline__ void meet(int team) {
  barrier_sync(1 + team, 32 * Config::SPLIT);
}

// Rounds this warp's accumulator into its rows of a swizzled tile. With SPLIT > 1, into its part of
// the columns.
template <class Target, class T, int HEAD_DIM, int SPLIT = 1, int MT, int NT>
__device__ __forceinline__ void stage_rows(const Accumulator<MT, NT>& c, uint32_t warp_tile,
                                           int share = 0) {
  using Layout = SwizzledRows<HEAD_DIM>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int row = m * 16 + lane / 4;
      const uint32_t at = warp_tile +
                          (Layout::offset(row, n / 2 * 2 * SPLIT + n % 2) ^ (share << 5)) +
                          (lane % 4) * 4;
      store_shared_4(at, pack<Target, T>(c.x[m][n][0], c.x[m][n][1]));
      store_shared_4(at + 8 * Layout::ROW_BYTES, pack<Target, T>(c.x[m][n][2], c.x[m][n][3]));
    }
}

// Copies ROWS staged rows, from row `first` on, to global memory with 128-bit accesses. LANES lanes
// take part; this one is `lane`. dst: row 0 of the tile. Rows from row_limit on and columns from
// `columns` on are not written.
template <int HEAD_DIM, int ROWS, int LANES>
__device__ __forceinline__ void store_staged(uint32_t tile, int lane, uint16_t* dst,
                                             int64_t row_stride, int row_limit, int columns,
                                             int first = 0) {
  using Layout = SwizzledRows<HEAD_DIM>;
  constexpr int PER_ROW = lanes_per_row(Layout::CHUNKS, 8 * LANES);
  constexpr int ROWS_PER_PASS = LANES / PER_ROW;
  static_assert(ROWS % ROWS_PER_PASS == 0);
#pragma unroll
  for (int i = 0; i < ROWS / ROWS_PER_PASS; ++i) {
    const int row = first + i * ROWS_PER_PASS + lane / PER_ROW;
#pragma unroll
    for (int c = 0; c < Layout::CHUNKS / PER_ROW; ++c) {
      const int chunk = c * PER_ROW + lane % PER_ROW;
      if (row < row_limit && chunk * 8 < columns) {
        store_global_16(dst + row * row_stride + chunk * 8,
                        load_shared_16(tile + Layout::offset(row, chunk)));
      }
    }
  }
}

// Stores whole rows of a warp's accumulator, by way of rows of a tile that no other warp uses.
template <class Target, class T, int HEAD_DIM, int MT>
__device__ __forceinline__ void store_rows(const Accumulator<MT, HEAD_DIM / 8>& c,
                                           uint32_t warp_tile, uint16_t* dst, int64_t row_stride,
                                           int row_limit, int columns) {
  __syncwarp();
  stage_rows<Target, T, HEAD_DIM>(c, warp_tile);
  __syncwarp();
  store_staged<HEAD_DIM, MT * 16, 32>(warp_tile, threadIdx.x % 32, dst, row_stride, row_limit,
                                      columns);
}

// Rounds a warp's rows of a sum and writes them through the warp's rows of a tile. With
// Config::SPLIT > 1, `part` selects the warp's columns, and all warps of the block must call this.
template <class Config, int COLUMNS, int NT>
__device__ __forceinline__ void store_sum(const Accumulator<Config::ROW_TILES, NT>& c,
                                          uint32_t warp_tile, int part, uint16_t* dst,
                                          int64_t row_stride, int row_limit, int columns) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  if constexpr (Config::SPLIT == 1) {
    store_rows<Target, T, COLUMNS, Config::ROW_TILES>(c, warp_tile, dst, row_stride, row_limit,
                                                      columns);
  } else {
    constexpr int MINE = Config::ROWS / Config::SPLIT;
    stage_rows<Target, T, COLUMNS, Config::SPLIT>(c, warp_tile, part);
    __syncthreads();  // the team has staged all columns
    // Starts at a multiple of 8 rows, where the swizzle repeats, and skips the rows before this
    // warp's rows.
    const int first = MINE % 8 == 0 ? 0 : part * MINE % 8;
    const int row = part * MINE - first;
    store_staged<COLUMNS, MINE, 32>(warp_tile + row * COLUMNS * 2, threadIdx.x % 32,
                                    dst + row * row_stride, row_stride, row_limit - row, columns,
                                    first);
  }
}

// Calls f(x, y, pair) for each pair of columns x, y of a lane's rows that exist. pair: reference to
// the same columns in `sums`: partial sums of a group split, or sums kept between query chunks.
template <int SPLIT, int MT, int NT, class Sums, class F>
__device__ __forceinline__ void each_partial(Sums& c, float* sums, int row_limit, int part, F f) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + lane / 4;
      if (row < row_limit) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int column = (n / 2 * SPLIT + part) * 16 + n % 2 * 8 + (lane % 4) * 2;
          f(c.x[m][n][2 * h], c.x[m][n][2 * h + 1],
            *reinterpret_cast<float2*>(sums + row * (NT * 8 * SPLIT) + column));
        }
      }
    }
}

template <int SPLIT, int MT, int NT>
__device__ __forceinline__ void store_partial(const Accumulator<MT, NT>& c, float* dst,
                                              int row_limit, int part) {
  each_partial<SPLIT, MT, NT>(c, dst, row_limit, part,
                              [](float x, float y, float2& at) { at = {x, y}; });
}

template <int SPLIT, int MT, int NT>
__device__ __forceinline__ void load_partial(Accumulator<MT, NT>& c, float* src, int row_limit,
                                             int part) {
  each_partial<SPLIT, MT, NT>(c, src, row_limit, part,
                              [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
}

}  // namespace flash_dist

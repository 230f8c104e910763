// One-tile products and stores with the helpers of the mma.sync kernels, for test_tile_gemm.py. The
// test compiles it for one target and dtype, with all head_dims in one library: -DTARGET=90
// -DTARGET_SUFFIX="'a'" -DELEMENT=Bf16.
#include "mma/fragments.cuh"
#include "ptx/barrier.cuh"

using namespace flash_dist;

#ifndef TARGET_SUFFIX
#define TARGET_SUFFIX '\0'
#endif
using Chip = Target<TARGET, TARGET_SUFFIX, Code::SASS>;
constexpr int ROWS = 32;
constexpr int THREADS = 128;
constexpr int PAIRS = THREADS / 64;  // pairs of warps; a pair shares 16 rows

// S = A @ B.T is [32, 32]. A, B and D are [32, HEAD_DIM], in shared memory.
enum Mode {
  A_BT,             // C = S
  NARROW_B,         // as A_BT, 8 columns at a time (NT = 1)
  REGISTERS_B,      // C = round(S) @ D: S in registers as the A operand, D read transposed
  TRANSPOSED_B,     // C = round(S).T @ D: the A operand transposed in registers, as spilled dS is
  TWO_WARPS,        // as REGISTERS_B: each of two warps has 16 columns of S, half of C's columns
  TWO_WARPS_NARROW  // as TWO_WARPS, with 8 columns of S each
};

struct Stored {
  using Target = Chip;
  using T = ELEMENT;
  static constexpr int ROW_TILES = 2;
  static constexpr int SPLIT = 1;
};

struct StoredByTwo {
  using Target = Chip;
  using T = ELEMENT;
  static constexpr int ROW_TILES = 1;
  static constexpr int SPLIT = 2;
  static constexpr int ROWS = 16;
};

template <int HEAD_DIM>
__device__ void load(uint32_t smem, const uint16_t* src, RowSpan rows, int columns) {
  TileCopy<Chip, ROWS, HEAD_DIM, THREADS> copy;
  copy.fetch(smem, src, HEAD_DIM, rows, columns);
  copy.land(smem);
  if constexpr (Chip::HAS_CP_ASYNC) {
    cp_async_commit();
    cp_async_wait<0>();
  }
  __syncthreads();
}

// Calls f(element, row, column) for this lane's part of an accumulator. Warps that share a row own
// alternate blocks of 16 columns.
template <int SPLIT, int MT, int NT, class F>
__device__ void each(Accumulator<MT, NT>& c, int half, F f) {
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < MT; ++m)
    for (int n = 0; n < NT; ++n)
      for (int e = 0; e < 4; ++e)
        f(c.x[m][n][e], m * 16 + e / 2 * 8 + lane / 4,
          (n / 2 * SPLIT + half) * 16 + n % 2 * 8 + lane % 4 * 2 + e % 2);
}

template <int HEAD_DIM>
__device__ void multiply_scores(uint32_t sA, uint32_t sB, bool narrow, float* c) {
  const auto a = Operand<HEAD_DIM>::a(sA);
  const auto put = [&](int column0) {
    return [=](float x, int row, int column) { c[row * ROWS + column0 + column] = x; };
  };
  if (narrow) {
    for (int n = 0; n < ROWS; n += 8) {
      Accumulator<2, 1> s;
      s.clear();
      gemm_abt<Chip, ELEMENT, HEAD_DIM, 4, 2, 1>(s, a, Operand<HEAD_DIM>::b_8(sB), n);
      each<1>(s, 0, put(n));
    }
  } else {
    Accumulator<2, 4> s;
    s.clear();
    gemm_abt<Chip, ELEMENT, HEAD_DIM, 4, 2, 4>(s, a, Operand<HEAD_DIM>::b(sB), 0);
    each<1>(s, 0, put(0));
  }
}

// Computes both products in one warp, with all columns.
template <int HEAD_DIM>
__device__ void multiply_twice(uint32_t sA, uint32_t sB, uint32_t sD, bool transposed, float* c) {
  Accumulator<2, 4> s;
  s.clear();
  gemm_abt<Chip, ELEMENT, HEAD_DIM, 4, 2, 4>(s, Operand<HEAD_DIM>::a(sA), Operand<HEAD_DIM>::b(sB),
                                             0);
  uint32_t left[2][2][4];  // [k][m]
  for (int k = 0; k < 2; ++k) to_a_operand<Chip, ELEMENT>(left[k], s, k);
  Accumulator<2, HEAD_DIM / 8> product;
  product.clear();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t operand[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t (&t)[4] = transposed ? left[m][k] : left[k][m];
      operand[m][0] = transposed ? movmatrix_trans(t[0]) : t[0];
      operand[m][1] = transposed ? movmatrix_trans(t[2]) : t[1];
      operand[m][2] = transposed ? movmatrix_trans(t[1]) : t[2];
      operand[m][3] = transposed ? movmatrix_trans(t[3]) : t[3];
    }
    gemm_ab_step<Chip, ELEMENT, HEAD_DIM>(product, operand, Operand<HEAD_DIM>::b_trans(sD), k * 16);
  }
  each<1>(product, 0, [=](float x, int row, int column) { c[row * HEAD_DIM + column] = x; });
}

// Computes both products in two warps per 16 rows, with NT * 8 columns of S per warp and pass.
template <int HEAD_DIM, int NT>
__device__ void multiply_by_two(uint32_t sA, uint32_t sB, uint32_t sD, uint32_t exchange,
                                float* c) {
  constexpr int BLOCKS = NT == 1 ? 1 : NT;  // fragments of 16 columns that two warps exchange
  const int pair = threadIdx.x / 64;
  const int half = threadIdx.x / 32 % 2;
  const auto a = Operand<HEAD_DIM>::a(sA + pair * 16 * HEAD_DIM * 2);
  const auto d = share(Operand<HEAD_DIM>::b_trans(sD), half);
  const uint32_t at = exchange + pair * BLOCKS * FRAGMENT_BYTES + threadIdx.x % 32 * 16;
  Accumulator<1, HEAD_DIM / 16> product;
  product.clear();
  for (int k0 = 0; k0 < ROWS; k0 += 2 * NT * 8) {
    Accumulator<1, NT> s;
    s.clear();
    const auto b = NT == 1 ? Operand<HEAD_DIM>::b_8(sB) : Operand<HEAD_DIM>::b(sB);
    gemm_abt<Chip, ELEMENT, HEAD_DIM, 4, 1, NT>(s, a, b, k0 + half * NT * 8);
    barrier_sync(1 + pair, 64);  // the fragments of the previous pass have been read
    put_fragments<Chip, ELEMENT, BLOCKS>(at, s, half);
    barrier_sync(1 + pair, 64);  // both warps have written their fragments
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
      const uint4 x = load_shared_16(at + k * FRAGMENT_BYTES);
      const uint32_t operand[1][4] = {{x.x, x.y, x.z, x.w}};
      gemm_ab_step<Chip, ELEMENT, HEAD_DIM, 2>(product, operand, d, k0 + k * 16);
    }
  }
  c += pair * 16 * HEAD_DIM;
  each<2>(product, half, [=](float x, int row, int column) { c[row * HEAD_DIM + column] = x; });
}

template <int HEAD_DIM>
__global__ void tile_gemm(Mode mode, RowSpan rows, int columns, const uint16_t* a,
                          const uint16_t* b, const uint16_t* d, float* c) {
  extern __shared__ __align__(128) uint16_t smem[];
  const uint32_t sA = shared_address(smem);
  const uint32_t sB = sA + ROWS * HEAD_DIM * 2;
  const uint32_t sD = sB + ROWS * HEAD_DIM * 2;
  const uint32_t exchange = sD + ROWS * HEAD_DIM * 2;
  load<HEAD_DIM>(sA, a, rows, columns);
  load<HEAD_DIM>(sB, b, rows, columns);
  load<HEAD_DIM>(sD, d, rows, columns);
  if (mode == TWO_WARPS) return multiply_by_two<HEAD_DIM, 2>(sA, sB, sD, exchange, c);
  if (mode == TWO_WARPS_NARROW) return multiply_by_two<HEAD_DIM, 1>(sA, sB, sD, exchange, c);
  if (threadIdx.x >= 32) return;
  if (mode <= NARROW_B) return multiply_scores<HEAD_DIM>(sA, sB, mode == NARROW_B, c);
  multiply_twice<HEAD_DIM>(sA, sB, sD, mode == TRANSPOSED_B, c);
}

// Rounds C[32, HEAD_DIM] and stores its first `rows` rows and `columns` columns through swizzled
// shared memory, with one warp, or with two per 16 rows.
template <int HEAD_DIM>
__global__ void tile_store(bool by_two, int rows, int columns, const float* c, uint16_t* dst) {
  extern __shared__ __align__(128) uint16_t smem[];
  const uint32_t tile = shared_address(smem);
  if (by_two) {
    const int half = threadIdx.x / 32 % 2;
    const int row0 = threadIdx.x / 64 * 16;
    Accumulator<1, HEAD_DIM / 16> x;
    each<2>(x, half,
            [=](float& y, int row, int column) { y = c[(row0 + row) * HEAD_DIM + column]; });
    store_sum<StoredByTwo, HEAD_DIM>(x, tile + row0 * HEAD_DIM * 2, half, dst + row0 * HEAD_DIM,
                                     HEAD_DIM, rows - row0, columns);
  } else if (threadIdx.x < 32) {
    Accumulator<2, HEAD_DIM / 8> x;
    each<1>(x, 0, [=](float& y, int row, int column) { y = c[row * HEAD_DIM + column]; });
    store_sum<Stored, HEAD_DIM>(x, tile, 0, dst, HEAD_DIM, rows, columns);
  }
}

template <int HEAD_DIM>
void gemm(Mode mode, RowSpan rows, int columns, const void* a, const void* b, const void* d,
          void* c) {
  const int bytes = 3 * ROWS * HEAD_DIM * 2 + PAIRS * 2 * FRAGMENT_BYTES;
  cudaFuncSetAttribute(&tile_gemm<HEAD_DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  tile_gemm<HEAD_DIM><<<1, THREADS, bytes>>>(
      mode, rows, columns, static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b),
      static_cast<const uint16_t*>(d), static_cast<float*>(c));
}

template <int HEAD_DIM>
void store(bool by_two, int rows, int columns, const void* c, void* dst) {
  tile_store<HEAD_DIM><<<1, THREADS, ROWS * HEAD_DIM * 2>>>(
      by_two, rows, columns, static_cast<const float*>(c), static_cast<uint16_t*>(dst));
}

// Calls f with head_dim as a compile-time constant. Returns false if it is not compiled or f fails.
template <class F>
bool dispatch(int head_dim, F f) {
  switch (head_dim) {
    case 32:
      f(std::integral_constant<int, 32>{});
      break;
    case 64:
      f(std::integral_constant<int, 64>{});
      break;
    case 96:
      f(std::integral_constant<int, 96>{});
      break;
    case 128:
      f(std::integral_constant<int, 128>{});
      break;
    case 160:
      f(std::integral_constant<int, 160>{});
      break;
    case 192:
      f(std::integral_constant<int, 192>{});
      break;
    case 224:
      f(std::integral_constant<int, 224>{});
      break;
    case 256:
      f(std::integral_constant<int, 256>{});
      break;
    default:
      return false;
  }
  return cudaDeviceSynchronize() == cudaSuccess;
}

extern "C" bool run_gemm(int head_dim, int mode, int first, int end, int columns, const void* a,
                         const void* b, const void* d, void* c) {
  return dispatch(head_dim, [=](auto size) {
    gemm<size()>(static_cast<Mode>(mode), {first, end}, columns, a, b, d, c);
  });
}

extern "C" bool run_store(int head_dim, int by_two, int rows, int columns, const void* c,
                          void* dst) {
  return dispatch(head_dim, [=](auto size) { store<size()>(by_two != 0, rows, columns, c, dst); });
}

// One-tile products on one warp through the ptx wrappers, one kernel per operand mode, for
// test_tile_gemm.py. Compiled there with -DTARGET=90 -DTARGET_SUFFIX="'a'" -DELEMENT=Bf16.
#include "mma/fragments.cuh"

using namespace flash_dist;

#ifndef TARGET_SUFFIX
#define TARGET_SUFFIX '\0'
#endif
using Chip = Target<TARGET, TARGET_SUFFIX, Code::SASS>;
constexpr int HEAD_DIM = 64;
constexpr int THREADS = 128;  // TileCopy moves 16 rows per pass
using Tile = TileCopy<Chip, 32, HEAD_DIM, THREADS>;

__device__ void load(Tile& copy, uint32_t smem, const uint16_t* src, int rows) {
  copy.fetch(smem, src, HEAD_DIM, rows);
  copy.land(smem);
  if constexpr (Chip::HAS_CP_ASYNC) {
    cp_async_commit();
    cp_async_wait<0>();
  }
  __syncthreads();
}

template <int MT, int NT>
__device__ void dump(const Accumulator<MT, NT>& c, float* dst) {
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= 32) return;
  for (int m = 0; m < MT; ++m)
    for (int n = 0; n < NT; ++n)
      for (int e = 0; e < 4; ++e)
        dst[(m * 16 + e / 2 * 8 + lane / 4) * NT * 8 + n * 8 + lane % 4 * 2 + e % 2] = c.x[m][n][e];
}

// mode 0: C[32, 32] = A @ B.T              A and B row-major in shared memory, `rows` rows of each
// exist mode 1: C[32, 64] = round(A @ B.T) @ D   first product in registers as the A operand, D
// read transposed mode 2: C[32, 64] = round(A @ B.T).T @ D  the A operand transposed in registers,
// as the spilled dS is
extern "C" __global__ void tile_gemm(int mode, int rows, const uint16_t* a, const uint16_t* b,
                                     const uint16_t* d, float* c) {
  __shared__ __align__(128) uint16_t smem[3][32 * HEAD_DIM];
  Tile copy;
  load(copy, shared_address(smem[0]), a, rows);
  load(copy, shared_address(smem[1]), b, rows);
  load(copy, shared_address(smem[2]), d, rows);
  Accumulator<2, 4> s;
  s.clear();
  gemm_abt<Chip, ELEMENT, HEAD_DIM, 4, 2, 4>(s, Operand<HEAD_DIM>::a(shared_address(smem[0])),
                                             Operand<HEAD_DIM>::b(shared_address(smem[1])), 0);
  if (mode == 0) {
    dump(s, c);
    return;
  }
  const Operand<HEAD_DIM> right = Operand<HEAD_DIM>::b_trans(shared_address(smem[2]));
  Accumulator<2, HEAD_DIM / 8> product;
  product.clear();
  uint32_t left[2][2][4];  // [k][m]
  for (int k = 0; k < 2; ++k) to_a_operand<Chip, ELEMENT>(left[k], s, k);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t operand[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const uint32_t (&t)[4] = mode == 1 ? left[k][m] : left[m][k];
      operand[m][0] = mode == 1 ? t[0] : movmatrix_trans(t[0]);
      operand[m][1] = mode == 1 ? t[1] : movmatrix_trans(t[2]);
      operand[m][2] = mode == 1 ? t[2] : movmatrix_trans(t[1]);
      operand[m][3] = mode == 1 ? t[3] : movmatrix_trans(t[3]);
    }
    gemm_ab_step<Chip, ELEMENT, HEAD_DIM, 2>(product, operand, right, k * 16);
  }
  dump(product, c);
}

// Rounds C[32, 64] and stores its first `rows` rows through swizzled shared memory.
extern "C" __global__ void tile_store(int rows, const float* c, uint16_t* dst) {
  __shared__ __align__(128) uint16_t smem[32 * HEAD_DIM];
  Accumulator<2, HEAD_DIM / 8> x;
  const int lane = threadIdx.x % 32;
  for (int m = 0; m < 2; ++m)
    for (int n = 0; n < HEAD_DIM / 8; ++n)
      for (int e = 0; e < 4; ++e)
        x.x[m][n][e] = c[(m * 16 + e / 2 * 8 + lane / 4) * HEAD_DIM + n * 8 + lane % 4 * 2 + e % 2];
  store_rows<Chip, ELEMENT, HEAD_DIM, 2>(x, shared_address(smem), dst, HEAD_DIM, rows);
}

// Matrix instructions of a warpgroup (4 warps, the first with a number divisible by 4) on sm_90a:
// D[64, N] (+)= A[64, 16] @ B[16, N], asynchronous, fp32 accumulators.
//
// The instructions that a warpgroup has issued since the last commit form a group. Code must wait
// for a product before it accesses the product's accumulator, or A if A is in registers. A fence
// must come after any other use of these registers, before the first instruction of a product. (PTX
// ISA, "Asynchronous wgmma Instructions".)
//
// Warp w has rows 16 w to 16 w + 15 of D, as the d fragments of mma m16n8 (ptx/mma.cuh), in d[N /
// 8][4]. A in registers is the a fragment of m16n8k16 of the same rows.
//
// wgmma<T, TRANSPOSED_A, TRANSPOSED_B, FIRST>(d, a, b) takes A and B as descriptors of tiles in
// shared memory (core/panels.cuh). wgmma<T, TRANSPOSED_B, FIRST>(d, a, b) takes A in registers.
// headers.py lists the values of N. TRANSPOSED: the rows of the tile are k. FIRST: writes D without
// reading it.
#pragma once

#include <cstdint>

#include "ptx/elements.h"
#include "wgmma_shapes.h"

namespace flash_dist {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the PENDING newest groups of this warp are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across this line. Needed before the fence,
// and after the wait that ends the product.
template <int NT>
__device__ __forceinline__ void hold(float (&d)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}

// Keeps the compiler from moving uses of A operands in registers across this line.
template <int KT>
__device__ __forceinline__ void hold(uint32_t (&a)[KT][1][4]) {
#pragma unroll
  for (int k = 0; k < KT; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k][0][i])::"memory");
}

}  // namespace flash_dist

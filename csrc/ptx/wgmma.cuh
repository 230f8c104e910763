// Matrix instructions of a warpgroup, 4 warps of which the first has a number divisible by 4, on
// sm_90a: D[64, N] (+)= A[64, 16] @ B[16, N], asynchronously, fp32 accumulators.
//
// What a warpgroup has issued since the last commit is a group. A product in flight owns its
// accumulator, and A where that lies in registers: neither is touched before a wait. The fence
// comes before the first instruction of a product, and after any other use of these registers.
// (PTX ISA, "Asynchronous wgmma Instructions".)
//
// Warp w has the rows 16 w to 16 w + 15 of D, each warp its rows as the d fragments of mma m16n8
// (ptx/mma.cuh), so that d[N / 8][4] holds them; A in registers is the a fragment of m16n8k16 of each
// warp's rows.
//
// wgmma<T, TRANSPOSED_A, TRANSPOSED_B, FIRST>(d, a, b), for the N that headers.py lists, takes B and
// A as descriptors of tiles in shared memory (core/panels.cuh), or A in registers:
// wgmma<T, TRANSPOSED_B, FIRST>(d, a, b). TRANSPOSED: the rows of the tile are k. FIRST: D is
// written and not read.
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

// Waits until at most PENDING of this warp's newest groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across this line: before the fence, and
// after the wait that ends its product.
template <int NT>
__device__ __forceinline__ void hold(float (&d)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}

// The same for A operands.
template <int KT>
__device__ __forceinline__ void hold(uint32_t (&a)[KT][1][4]) {
#pragma unroll
  for (int k = 0; k < KT; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[k][0][i])::"memory");
}

}  // namespace flash_dist

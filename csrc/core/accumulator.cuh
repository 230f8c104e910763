// A warp's accumulator of a matrix product: MT tiles of 16 rows, NT tiles of 8 columns.
#pragma once

#include "ptx/convert.cuh"

namespace flash_dist {

// x[m][n]: row tile m and column tile n, laid out as the d fragment of mma m16n8 (ptx/mma.cuh).
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

  __device__ __forceinline__ void add(const Accumulator& other) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] += other.x[m][n][i];
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

// Rounds columns [16 * k16, 16 * k16 + 16) of c to T. a becomes the A operand of the next product.
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

}  // namespace flash_dist

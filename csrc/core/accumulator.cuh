// What a warp holds of a product: MT tiles of 16 rows, NT tiles of 8 columns.
#pragma once

namespace flash_dist {

// x[m][n]: the d fragment of mma m16n8 (ptx/mma.cuh) of row tile m and column tile n.
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

}  // namespace flash_dist

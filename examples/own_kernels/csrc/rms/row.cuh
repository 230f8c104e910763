// The part of a row that a thread owns, and sums over a row. A block has the threads of one row.
#pragma once

#include "vector.cuh"

namespace own_kernels {

using Fp16 = __half;  // named after the dtypes of kernels.toml
using Bf16 = __nv_bfloat16;

constexpr int WIDTH = 8;  // neighbouring columns of a thread: one vector

struct Columns {
  float values[WIDTH];
};

// Loads WIDTH columns of a row from `column` on; columns from `hidden` on are 0.
template <class T>
__device__ __forceinline__ Columns load_columns(const T* row, int column, int hidden,
                                                bool aligned) {
  Columns result{};
  if (aligned && column < hidden) {
    const Vector<T> vector = load_vector(row + column);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) result.values[i] = static_cast<float>(vector.elements[i]);
  } else if (!aligned) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      if (column + i < hidden) result.values[i] = static_cast<float>(row[column + i]);
    }
  }
  return result;
}

template <class T>
__device__ __forceinline__ void store_columns(T* row, const Columns& columns, int column,
                                              int hidden, bool aligned) {
  if (aligned && column < hidden) {
    Vector<T> vector;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) vector.elements[i] = static_cast<T>(columns.values[i]);
    store_vector(row + column, vector);
  } else if (!aligned) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      if (column + i < hidden) row[column + i] = static_cast<T>(columns.values[i]);
    }
  }
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

// The sum over all threads of a block, with the same bits in each. The next sum of a block must use
// another array of `sums`: a slow warp may still read this one.
template <int WARPS>
__device__ __forceinline__ float block_sum(float value, float (&sums)[WARPS]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  value = warp_sum(value);
  if (lane == 0) sums[warp] = value;
  __syncthreads();  // all warps have written sums before any warp reads them
  return warp_sum(lane < WARPS ? sums[lane] : 0.0f);
}

// rstd = 1 / sqrt(mean(x * x) + eps)
template <int WARPS>
__device__ __forceinline__ float reciprocal_rms(const Columns& x, int hidden, float eps,
                                                float (&sums)[WARPS]) {
  float sum = 0.0f;
#pragma unroll
  for (float value : x.values) sum += value * value;
  return rsqrtf(block_sum(sum, sums) / static_cast<float>(hidden) + eps);
}

// out = x * rstd * weight
__device__ __forceinline__ Columns normalize(Columns x, float rstd, const Columns& weight) {
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) x.values[i] *= rstd * weight.values[i];
  return x;
}

}  // namespace own_kernels

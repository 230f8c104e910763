// RMS norm, backward. With x_hat = x * rstd and g = dout * weight of a row:
//
//   dx = (g - x_hat * mean(g * x_hat)) * rstd
//   dweight = sum over rows of dout * x_hat
//
// Grid      p.blocks blocks; block b has rows b, b + p.blocks, ...
// Block     HIDDEN / 8 threads, each with 8 columns and their dweight in registers.
//
// rms/dweight.cuh then adds up dweight of all blocks. There are no atomics: the order of each sum
// follows from the numbers of rows and blocks, so the bits are the same in every run.
#pragma once

#include "native/entry.h"
#include "native/target.h"
#include "plans.h"
#include "rms/params.h"
#include "rms/row.cuh"

namespace own_kernels {

template <class Target, class T_, int HIDDEN, int PLAN>
struct RmsBwdConfig : RmsBwdPlan<HIDDEN, PLAN> {
  using T = T_;
  static constexpr int THREADS = HIDDEN / WIDTH;
  static constexpr int WARPS = THREADS / 32;
  static constexpr int SMEM_BYTES = 0;  // dynamic
};

template <class Config>
__device__ __forceinline__ void rms_bwd_block(const RmsBwdParams& p) {
  using T = typename Config::T;
  __shared__ float sums[2][Config::WARPS];
  const int column = WIDTH * threadIdx.x;
  const auto load = [&](const void* tensor, int64_t row) {
    return load_columns(static_cast<const T*>(tensor) + row * p.hidden, column, p.hidden,
                        p.aligned);
  };

  const Columns weight = load(p.weight, 0);
  Columns dweight{};
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += p.blocks, turn ^= 1) {
    // x_hat = x * rstd                    [HIDDEN]
    // dweight += dout * x_hat             [HIDDEN]
    // g = dout * weight                   [HIDDEN]
    Columns x_hat = load(p.x, row), g = load(p.dout, row);
    const float rstd = p.rstd[row];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) {
      x_hat.values[i] *= rstd;
      dweight.values[i] += g.values[i] * x_hat.values[i];
      g.values[i] *= weight.values[i];
      sum += g.values[i] * x_hat.values[i];
    }
    // dx = (g - x_hat * mean(g * x_hat)) * rstd   [HIDDEN]
    const float mean = block_sum(sum, sums[turn]) / static_cast<float>(p.hidden);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) g.values[i] = (g.values[i] - x_hat.values[i] * mean) * rstd;
    store_columns(static_cast<T*>(p.dx) + row * p.hidden, g, column, p.hidden, p.aligned);
  }
  // partial = dweight of these rows       [HIDDEN], fp32
  float* partial = p.partial + int64_t{blockIdx.x} * p.hidden;
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) {
    if (column + i < p.hidden) partial[column + i] = dweight.values[i];
  }
}

template <class Config>
cudaError_t launch_rms_bwd(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  return launch_1d(entry, params, static_cast<const RmsBwdParams*>(params)->blocks, stream);
}

}  // namespace own_kernels

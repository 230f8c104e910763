// RMS norm, forward: out = x * rstd * weight with rstd = 1 / sqrt(mean(x * x) + eps).
//
// Grid      one block per row.
// Block     HIDDEN / 8 threads, each with 8 columns in registers.
#pragma once

#include "native/entry.h"
#include "native/target.h"
#include "plans.h"
#include "rms/params.h"
#include "rms/row.cuh"

namespace own_kernels {

template <class Target, class T_, int HIDDEN, int PLAN>
struct RmsConfig : RmsPlan<HIDDEN, PLAN> {
  using T = T_;
  static constexpr int THREADS = HIDDEN / WIDTH;
  static constexpr int WARPS = THREADS / 32;
  static constexpr int SMEM_BYTES = 0;  // dynamic
};

template <class Config>
__device__ __forceinline__ void rms_block(const RmsParams& p) {
  using T = typename Config::T;
  __shared__ float sums[Config::WARPS];
  const int64_t row = blockIdx.x, begin = row * p.hidden;
  const int column = WIDTH * threadIdx.x;

  // x, weight                           [HIDDEN]
  const T* x_row = static_cast<const T*>(p.x) + begin;
  const Columns x = load_columns(x_row, column, p.hidden, p.aligned);
  const Columns weight = load_columns(static_cast<const T*>(p.weight), column, p.hidden, p.aligned);
  // rstd = 1 / sqrt(mean(x * x) + eps)  []
  const float rstd = reciprocal_rms(x, p.hidden, p.eps, sums);
  if (threadIdx.x == 0) p.rstd[row] = rstd;
  // out = x * rstd * weight             [HIDDEN]
  T* out_row = static_cast<T*>(p.out) + begin;
  store_columns(out_row, normalize(x, rstd, weight), column, p.hidden, p.aligned);
}

template <class Config>
cudaError_t launch_rms(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  return launch_1d(entry, params, static_cast<const RmsParams*>(params)->rows, stream);
}

}  // namespace own_kernels

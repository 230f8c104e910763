// RMS norm, forward, on Hopper: the same bits as rms/fwd.cuh, with more bytes in flight.
//
// A norm is bound by memory. In the general kernel each thread waits for 16 bytes of x, so 16 to 24
// KB per multiprocessor are in flight. Here one thread requests whole rows from the TMA unit ahead
// of time, so 64 KB are in flight.
//
// Grid      as many blocks as run at a time; block b has rows b, b + grid, ...
// Block     HIDDEN / 8 threads, each with 8 columns of a row.
// Shared    STAGES rows of x, and a barrier for each.
// Pipeline  the copy of row i + STAGES starts once all threads have read row i.
#pragma once

#include "native/entry.h"
#include "native/target.h"
#include "plans.h"
#include "rms/bulk_copy.cuh"
#include "rms/params.h"
#include "rms/row.cuh"

namespace own_kernels {

template <class T, int HIDDEN, int STAGES>
struct RmsSm90Smem {
  alignas(16) T x[STAGES][HIDDEN];
  uint64_t x_full[STAGES];
  float sums[2][HIDDEN / WIDTH / 32];
};

template <class Target, class T_, int HIDDEN, int PLAN>
struct RmsSm90Config : RmsSm90Plan<HIDDEN, PLAN> {
  using Plan = RmsSm90Plan<HIDDEN, PLAN>;
  using T = T_;
  using Smem = RmsSm90Smem<T, HIDDEN, Plan::STAGES>;
  static constexpr int THREADS = HIDDEN / WIDTH;
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

template <class Config>
__device__ __forceinline__ void rms_sm90_block(const RmsParams& p) {
  using T = typename Config::T;
  constexpr int STAGES = Config::STAGES;
  extern __shared__ __align__(16) unsigned char dynamic_smem[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(dynamic_smem);
  const int column = WIDTH * threadIdx.x;

  const auto start_row = [&](int64_t row, int stage) {
    if (threadIdx.x != 0 || row >= p.rows) return;
    start_copy(smem.x[stage], static_cast<const T*>(p.x) + row * p.hidden,
               p.hidden * static_cast<int>(sizeof(T)), smem.x_full[stage]);
  };
  if (threadIdx.x == 0) {
    for (uint64_t& barrier : smem.x_full) init_barrier(barrier);
  }
  __syncthreads();  // the barriers are initialised before any thread waits on them
  for (int stage = 0; stage < STAGES; ++stage) {
    start_row(blockIdx.x + int64_t{stage} * gridDim.x, stage);
  }

  // weight                                [HIDDEN], once for all rows
  const Columns weight = load_columns(static_cast<const T*>(p.weight), column, p.hidden, true);
  int step = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, ++step) {
    const int stage = step % STAGES;
    // x                                   [HIDDEN]
    wait_for_copy(smem.x_full[stage], step / STAGES % 2);
    const Columns x = load_columns(smem.x[stage], column, p.hidden, true);
    // rstd = 1 / sqrt(mean(x * x) + eps)  []
    const float rstd = reciprocal_rms(x, p.hidden, p.eps, smem.sums[step % 2]);
    // The barrier of that sum also orders the reads of this stage before its next copy.
    start_row(row + int64_t{STAGES} * gridDim.x, stage);
    if (threadIdx.x == 0) p.rstd[row] = rstd;
    // out = x * rstd * weight             [HIDDEN]
    T* out_row = static_cast<T*>(p.out) + row * p.hidden;
    store_columns(out_row, normalize(x, rstd, weight), column, p.hidden, true);
  }
}

template <class Config>
const char* refuse_rms_sm90(const void* params) {
  const bool aligned = static_cast<const RmsParams*>(params)->aligned;
  return aligned ? nullptr : "the copy engine needs rows that begin at multiples of 16 bytes";
}

template <class Config>
cudaError_t launch_rms_sm90(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const RmsParams*>(params);
  const int64_t most = int64_t{p.sm_count} * Config::MIN_BLOCKS;
  return launch_1d(entry, params, p.rows < most ? p.rows : most, stream);
}

}  // namespace own_kernels

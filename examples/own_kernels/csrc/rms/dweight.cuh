// dweight of RMS norm: the sum of the partial sums of all blocks of rms/bwd.cuh, in a fixed order.
//
// Grid      one block per 32 columns.
// Block     WARPS warps; lane l has column l, warp w has blocks w, w + WARPS, ...
#pragma once

#include "native/entry.h"
#include "native/target.h"
#include "plans.h"
#include "rms/params.h"
#include "rms/row.cuh"

namespace own_kernels {

template <class Target, class T_, int HIDDEN, int PLAN>
struct RmsDweightConfig : RmsDweightPlan<HIDDEN, PLAN> {
  using T = T_;
  static constexpr int THREADS = 32 * RmsDweightPlan<HIDDEN, PLAN>::WARPS;
  static constexpr int SMEM_BYTES = 0;  // dynamic
};

template <class Config>
__device__ __forceinline__ void rms_dweight_block(const RmsDweightParams& p) {
  constexpr int WARPS = Config::WARPS;
  __shared__ float sums[WARPS][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = 32 * blockIdx.x + lane;
  if (column < p.hidden) {
    // sums = partial[warp] + partial[warp + WARPS] + ...   [WARPS, 32]
    float sum = 0.0f;
#pragma unroll 4
    for (int block = warp; block < p.blocks; block += WARPS) {
      sum += p.partial[int64_t{block} * p.hidden + column];
    }
    sums[warp][lane] = sum;
  }
  __syncthreads();  // all warps have written sums before the first one reads them
  if (warp != 0 || column >= p.hidden) return;
  // dweight = sums[0] + sums[1] + ...                      [32]
  float sum = 0.0f;
  for (int other = 0; other < WARPS; ++other) sum += sums[other][lane];
  static_cast<typename Config::T*>(p.dweight)[column] = static_cast<typename Config::T>(sum);
}

template <class Config>
cudaError_t launch_rms_dweight(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  const int hidden = static_cast<const RmsDweightParams*>(params)->hidden;
  return launch_1d(entry, params, (hidden + 31) / 32, stream);
}

}  // namespace own_kernels

// Launches the forward kernel for pairs of blocks, and decides which calls are left to the general
// kernel.
#pragma once

#include "core/blocks.cuh"
#include "sm90/axes.h"
#include "sm90/fwd_pair/config.h"

namespace flash_dist {

template <class Config>
const char* refuse_fwd_pair_sm90(const void* params) {
  const FwdParams& p = *static_cast<const FwdParams*>(params);
  return find_problem<Config>(p, p.out);
}

template <class Config>
cudaError_t launch_fwd_pair_sm90(const KernelEntry& entry, const void* params,
                                 cudaStream_t stream) {
  FwdSm90Params all;
  FwdParams& p = all.p = static_cast<const FwdCall*>(params)->params;
  const CallAxes axes(p);
  AxisSteps out_axes;
  const MapRequest maps[] = {
      {&all.q, &all.q_axes, &p.q, axes.rows_q, p.head_dim, &axes.q, Config::BLOCK_M},
      {&all.k, &all.k_axes, &p.k, axes.rows_k, p.head_dim, &axes.k, Config::BLOCK_N},
      {&all.v, &all.v_axes, &p.v, axes.rows_k, p.head_dim_v, &axes.k, Config::BLOCK_N},
      {&all.out, &out_axes, &p.out, axes.rows_q, p.head_dim_v, &axes.q,
       Config::BLOCK_M / Config::CONSUMERS},
  };
  const cudaError_t status = make_maps<Config>(maps);
  if (status != cudaSuccess) return status;
  const FwdGrid grid(p, Config::BLOCK_M);
  return launch_in_order(entry, p, grid, all, stream);
}

}  // namespace flash_dist

// Launches the dK/dV kernels whose blocks sum half of the columns, and decides which calls are left
// to the general kernel.
#pragma once

#include "sm90/bwd/launch.h"
#include "sm90/bwd_halves/config.h"

namespace flash_dist {

template <class Config>
const char* refuse_dkdv_halves_sm90(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  if (!p.stores_ds) return "its two launches pass P through the place of dS";
  return find_problem<Config>(p, p.dout);
}

template <class Config>
cudaError_t launch_dkdv_halves_sm90(const KernelEntry& entry, const void* params,
                                    cudaStream_t stream) {
  DkdvHalvesSm90Params all;
  BwdParams& p = all.p = *static_cast<const BwdParams*>(params);
  cudaError_t status = make_dkdv_maps<Config>(all);
  const DkdvGrid grid(p, Config::BLOCK_N);
  for (const bool sums_dk : {false, true}) {
    all.sums_dk = sums_dk;
    if (status == cudaSuccess) status = launch_in_order(entry, p, grid, all, stream);
  }
  return status;
}

}  // namespace flash_dist

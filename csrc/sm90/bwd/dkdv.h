// The dK/dV kernels for Hopper: one block per key tile, or two blocks that share a key tile.
#pragma once

#include "sm90/bwd/dkdv.cuh"
#include "sm90/bwd/dkdv_pair.cuh"

namespace flash_dist {

template <class Config>
__device__ __forceinline__ void dkdv_sm90_block(const typename Config::Params& params) {
  if constexpr (Config::CLUSTER == 1) {
    dkdv_of_block<Config>(params);
  } else {
    dkdv_of_pair<Config>(params);
  }
}

}  // namespace flash_dist

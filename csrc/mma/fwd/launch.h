// Grid and launch of the forward kernel.
#pragma once

#include "core/entry.h"
#include "mma/fwd/config.h"
#include "mma/fwd/kernel.cuh"

namespace flash_dist {

template <class Config>
cudaError_t launch_fwd(const void* kernel, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const FwdParams*>(params);
  const int64_t tiles = (p.seqlen_q + Config::BLOCK_M - 1) / Config::BLOCK_M;
  const int64_t blocks = tiles * p.batch * p.num_heads_kv * p.group;
  return launch_1d<Config>(kernel, params, blocks, stream);
}

}  // namespace flash_dist

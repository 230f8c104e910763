// Grid and launch of the forward kernel.
#pragma once

#include "core/entry.h"
#include "mma/fwd/config.h"
#include "mma/fwd/kernel.cuh"

namespace flash_dist {

template <class Config>
cudaError_t launch_fwd(const void* kernel, const void* params, cudaStream_t stream) {
  FwdParams p = *static_cast<const FwdParams*>(params);
  const int64_t tiles = (p.seqlen_q + Config::BLOCK_M - 1) / Config::BLOCK_M;
  const int64_t num_heads_q = int64_t{p.num_heads_kv} * p.group;
  p.by_num_heads_q = make_divisor(num_heads_q);
  p.by_group = make_divisor(p.group);
  return launch_in_order<Config>(kernel, p, tiles, p.batch * num_heads_q, stream);
}

}  // namespace flash_dist

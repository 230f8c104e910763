// Launch of a kernel that reads a cache.
#pragma once

#include "core/behind.h"
#include "core/decode.h"
#include "core/schedule.cuh"

namespace flash_dist {

template <class Config>
cudaError_t launch_decode(const void* kernel, const void* params, cudaStream_t stream) {
  DecodeParams p = *static_cast<const DecodeParams*>(params);
  p.by_group = make_divisor(p.group);
  p.by_heads = make_divisor(p.num_heads_kv);
  p.cache.by_page = make_divisor(p.cache.page);
  return launch_behind<Config>(kernel, &p, dim3(p.shares), stream);
}

}  // namespace flash_dist

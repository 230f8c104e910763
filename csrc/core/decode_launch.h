// Launch of a kernel that reads a cache, and of the one that combines its partial results.
#pragma once

#include "core/decode.h"
#include "core/schedule.cuh"
#include "native/entry.h"

namespace flash_dist {

inline DecodeParams with_divisors(DecodeParams p) {
  p.by_group = make_divisor(p.group);
  p.by_tiles = make_divisor(p.row_tiles);
  p.cache.by_page = make_divisor(p.cache.page);
  return p;
}

template <class Config>
cudaError_t launch_decode(const void* kernel, const void* params, cudaStream_t stream) {
  const DecodeParams p = with_divisors(*static_cast<const DecodeParams*>(params));
  return launch_1d<Config>(kernel, &p, p.splits, stream);
}

}  // namespace flash_dist

// Launch of the kernel of latent keys for many heads, and which calls it serves.
#pragma once

#include "core/decode_work.cuh"
#include "sm90/axes.h"
#include "sm90/mla/kernel.cuh"

namespace flash_dist {

// Fewer heads are one tile of the other kernel, which is as fast as memory, with bits of its own.
// More would be several tiles there.
// NOTE: a rule of heads alone, not of queries: a prefill in chunks has the bits of the prefill at
// once.
constexpr int MANY_HEADS = 17;

inline Axes cache_axes(const DecodeParams& p) { return {1, p.num_heads_kv, p.cache.entries}; }

template <class Config>
const char* refuse_mla_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  if (p.group < MANY_HEADS) return "tiles of 64 rows are for at least 17 heads of a group";
  return find_map_problem(p.cache.k, p.cache.page, p.head_dim, cache_axes(p));
}

template <class Config>
cudaError_t launch_mla_sm90(const void* kernel, const void* params, cudaStream_t stream) {
  MlaSm90Params all;
  DecodeParams& p = all.p = with_divisors(*static_cast<const DecodeParams*>(params));
  const CacheParams& cache = p.cache;
  const bool in_tiles = cache.block_table == nullptr ||
                        (cache.page % Config::BLOCK_N == 0 && cache.cache_leftpad == nullptr);
  all.box_keys = in_tiles ? Config::BLOCK_N : PAGE_STEP;
  const Axes axes = cache_axes(p);
  const MapRequest maps[] = {
      {&all.k, &all.k_axes, &cache.k, cache.page, p.head_dim, &axes, all.box_keys}};
  const cudaError_t status = make_maps<Config>(maps);
  if (status != cudaSuccess) return status;
  return launch_1d<Config>(kernel, &all, p.splits, stream);
}

}  // namespace flash_dist

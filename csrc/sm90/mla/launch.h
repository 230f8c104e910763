// Launches the kernels of latent keys for many heads, and decides which calls they serve.
#pragma once

#include <algorithm>

#include "core/decode_combine.h"
#include "core/decode_work.cuh"
#include "sm90/axes.h"
#include "sm90/mla/kernel.cuh"
#include "sm90/mla/values.cuh"

namespace flash_dist {

// The smallest number of query heads per kv head that these kernels serve. With fewer heads, one
// tile of 16 rows of mma/mla holds all heads, and memory bandwidth limits that kernel. With more
// heads, it would need several tiles. NOTE: the two families give different bits. The rule depends
// on heads only, not on queries, so that a prefill in chunks gives the same bits as in one call.
constexpr int MANY_HEADS = 17;

inline Axes cache_axes(const DecodeParams& p) { return {1, p.num_heads_kv, p.cache.entries}; }

template <class Config>
const char* refuse_mla_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  if (p.group < MANY_HEADS) return "tiles of 64 rows are for at least 17 heads of a group";
  return find_map_problem(p.cache.k, p.cache.page, p.head_dim, cache_axes(p));
}

// Fills in the arguments of a kernel, then launches it.
template <class Config, class Launch>
cudaError_t launch_latent(const void* params, Launch launch) {
  MlaSm90Params all;
  LatentParams& p = all.p = *static_cast<const LatentParams*>(params);
  static_cast<DecodeParams&>(p) = with_divisors(p);
  const CacheParams& cache = p.cache;
  const bool in_tiles = cache.block_table == nullptr ||
                        (cache.page % LATENT_TILE == 0 && cache.cache_leftpad == nullptr);
  all.box_keys = in_tiles ? LATENT_TILE : PAGE_STEP;
  const Axes axes = cache_axes(p);
  const MapRequest maps[] = {
      {&all.k, &all.k_axes, &cache.k, cache.page, p.head_dim, &axes, all.box_keys}};
  const cudaError_t status = make_maps<Config>(maps);
  if (status != cudaSuccess) return status;
  return launch(&all);
}

template <class Config>
cudaError_t launch_mla_sm90(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  const int64_t blocks = int64_t{p.splits} * (p.block_rows / Config::BLOCK_ROWS);
  return launch_latent<Config>(
      params, [&](const MlaSm90Params* all) { return launch_1d(entry, all, blocks, stream); });
}

// Launches a block for each possible group and each panel of values.
template <class Config>
cudaError_t launch_mla_values_sm90(const KernelEntry& entry, const void* params,
                                   cudaStream_t stream) {
  const auto& p = *static_cast<const LatentParams*>(params);
  constexpr int GROUP = Config::Splits::GROUP;
  const int tiles = p.batch * p.row_tiles * p.num_heads_kv;
  const int of_tile = (p.cache.capacity + GROUP * KEY_BLOCK - 1) / (GROUP * KEY_BLOCK);
  const int64_t groups =
      std::min<int64_t>(int64_t{tiles} * std::max(of_tile, 1), p.few_key_blocks / GROUP + tiles);
  const dim3 blocks(static_cast<unsigned>(groups * Config::PANELS));
  return launch_latent<Config>(params, [&](const MlaSm90Params* all) {
    return launch_behind<Config>(entry, all, blocks, stream);
  });
}

}  // namespace flash_dist

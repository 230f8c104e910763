// Launches the Hopper forward that is bit-identical to decoding, and decides which calls are left
// to the decode kernels.
#pragma once

#include "core/blocks.cuh"
#include "sm90/axes.h"
#include "sm90/fwd_kvcache/config.h"

namespace flash_dist {

// Returns the number of keys per box: a key block or, in a paged cache, the largest part of a key
// block that no page boundary cuts.
inline int box_keys(const CacheParams& cache) {
  const int apart = cache.block_table == nullptr ? KEY_BLOCK : cache.page | KEY_BLOCK;
  return apart & -apart;
}

inline CallAxes kvcache_axes(const FwdKvcacheCall& call) {
  CallAxes axes(call.params);
  axes.rows_k = call.cache.page;
  axes.k = {1, call.params.num_heads_kv, call.cache.entries};
  return axes;
}

template <class Config>
const char* refuse_fwd_kvcache_sm90(const void* params) {
  const auto& call = *static_cast<const FwdKvcacheCall*>(params);
  const FwdParams& p = call.params;
  if (p.mask.kind != MaskKind::BAND) return "a cache has no masks but bands";
  if (call.cache.block_table != nullptr && call.cache.cache_leftpad != nullptr) {
    return "with left padding key blocks begin anywhere in a page";
  }
  return find_problem<Config>(p, p.out, kvcache_axes(call));
}

template <class Config>
cudaError_t launch_fwd_kvcache_sm90(const KernelEntry& entry, const void* params,
                                    cudaStream_t stream) {
  const auto& call = *static_cast<const FwdKvcacheCall*>(params);
  typename Config::Params all;
  FwdParams& p = all.p = call.params;
  const CacheParams& cache = all.cache = call.cache;
  all.cache.by_page = make_divisor(cache.page);
  all.box_keys = box_keys(cache);
  all.ends_in_zeros = cache.block_table == nullptr && cache.cache_seqlens == nullptr &&
                      cache.cu_seqlens_k == nullptr;
  const CallAxes axes = kvcache_axes(call);
  AxisSteps out_axes;
  const MapRequest maps[] = {
      {&all.q, &all.q_axes, &p.q, axes.rows_q, p.head_dim, &axes.q, Config::BLOCK_M},
      {&all.k, &all.k_axes, &p.k, axes.rows_k, p.head_dim, &axes.k, all.box_keys},
      {&all.v, &all.v_axes, &p.v, axes.rows_k, p.head_dim_v, &axes.k, all.box_keys},
      {&all.out, &out_axes, &p.out, axes.rows_q, p.head_dim_v, &axes.q, 64},
  };
  const cudaError_t status = make_maps<Config>(maps);
  if (status != cudaSuccess) return status;
  const FwdGrid grid(p, Config::BLOCK_M);
  const int64_t tiles = grid.tiles * grid.groups;
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  p.order = make_order(grid.tiles, grid.groups, p.heads_together);
  all.tiles = static_cast<int>(tiles);
  all.tickets = call.tickets;
  all.parked = call.parked;
  // At most one block per multiprocessor: `parked` has room for O of sm_count blocks.
  return launch_1d(entry, &all, std::min<int64_t>(tiles, p.sm_count), stream);
}

}  // namespace flash_dist

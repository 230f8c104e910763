// Launches the kernel for the gradient of a bias on Hopper, and decides which calls are left to the
// general kernel.
#pragma once

#include <algorithm>

#include "sm90/bwd/launch.h"
#include "sm90/bwd_bias/config.h"

namespace flash_dist {

// Returns the number of tiles of a gradient.
template <class Config>
int64_t count_bias_tiles(const BiasGradientParams& all) {
  const int64_t rows = (int64_t{all.p.seqlen_q} + Config::BLOCK_M - 1) / Config::BLOCK_M;
  const int64_t columns = (int64_t{all.p.seqlen_k} + Config::BLOCK_N - 1) / Config::BLOCK_N;
  return rows * columns * all.batches * all.heads * all.splits;
}

template <class Config>
const char* refuse_bias_gradient_sm90(const void* params) {
  const BiasGradientParams& all = *static_cast<const BiasGradientParams*>(params);
  const BwdParams& p = all.p;
  if (all.sums_queries || all.sums_keys || p.bias.row == 0) {
    return "it sums over neither queries nor keys";
  }
  const char* problem = find_problem_beside_bias<Config>(p, p.dout);
  if (problem != nullptr) return problem;
  if (count_bias_tiles<Config>(all) > INT32_MAX / 2) return "it counts tiles in 32 bits";
  return Config::BIAS == BiasLoads::BOXES ? find_bias_map_problem(p) : nullptr;
}

template <class Config>
cudaError_t launch_bias_gradient_sm90(const KernelEntry& entry, const void* params,
                                      cudaStream_t stream) {
  const BiasGradientCall& call = *static_cast<const BiasGradientCall*>(params);
  BiasGradientSm90Params all{};
  all.p = call.p;
  all.rounds = call.rounded != nullptr;
  all.sums = all.rounds ? call.rounded : call.parts;
  all.batches = call.batches;
  all.heads = call.heads;
  all.visits = call.visits;
  all.splits = call.splits;
  all.query_tiles = (call.p.seqlen_q + Config::BLOCK_M - 1) / Config::BLOCK_M;
  all.key_tiles = (call.p.seqlen_k + Config::BLOCK_N - 1) / Config::BLOCK_N;
  all.tiles = static_cast<int>(count_bias_tiles<Config>(call));
  all.by_query_tiles = make_divisor(all.query_tiles);
  all.by_key_tiles = make_divisor(all.key_tiles);
  all.by_heads = make_divisor(all.heads);
  all.by_batches = make_divisor(all.batches);
  all.by_group = make_divisor(call.p.group);
  cudaError_t status = make_dkdv_maps<Config>(all);
  if (Config::BIAS == BiasLoads::BOXES && status == cudaSuccess) {
    status = make_bias_map<Config>(all);
  }
  if (status != cudaSuccess) return status;
  return launch_1d(entry, &all, std::min(all.tiles, call.sm_count), stream);
}

}  // namespace flash_dist

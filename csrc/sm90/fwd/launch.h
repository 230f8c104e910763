// Launches the forward kernel for Hopper, and selects the calls that the general kernel serves
// instead.
#pragma once

#include "core/blocks.cuh"
#include "core/max_logit.h"
#include "sm90/axes.h"
#include "sm90/fwd/config.h"

namespace flash_dist {

// Returns whether tiles of 64 queries are faster for a call than tiles of `larger` queries. The
// small tiles are faster if they have clearly fewer rows in all, or if there is at most one larger
// tile per multiprocessor: the longest tile then decides the time of the call. If all tiles are
// equally long, the limit is one larger tile per two multiprocessors.
inline bool small_tiles_pay(const FwdParams& p, int larger) {
  const int64_t tiles = (int64_t{p.seqlen_q} + larger - 1) / larger;
  const int64_t small_tiles = (int64_t{p.seqlen_q} + 63) / 64;
  if (6 * 64 * small_tiles <= 5 * larger * tiles) return true;
  const int64_t all = tiles * p.batch * p.num_heads_kv * p.group;
  return (is_even(p.mask, p.packing.cu_seqlens_q != nullptr) ? 2 * all : all) <= p.sm_count;
}

template <class Config>
const char* find_bias_problem(const FwdParams& p) {
  const char* problem = find_problem_beside_bias<Config>(p, p.out);
  if (problem != nullptr) return problem;
  if (2 * p.head_dim <= Config::HEAD_DIM) return "the general family has fewer columns";
  if (static_cast<bool>(p.bias.is_fp32) != Config::BIAS_IS_FP32) {
    return Config::BIAS_IS_FP32 ? "it is for a bias of float32" : "it is for a bias of 16 bits";
  }
  return p.bias.key == 1 ? nullptr : "keys of the bias are not neighbours";
}

template <class Config>
const char* refuse_fwd_sm90(const void* params) {
  const FwdParams& p = *static_cast<const FwdParams*>(params);
  if (p.mask.kind == MaskKind::TILES && Config::LIST_N == 0) return "its tile takes no lists";
  if (Config::HAS_SCORE_MOD && Config::KEEP_S && p.scores.alibi != nullptr) {
    return "it keeps scores in vain where ALiBi lets maxima grow from step to step";
  }
  if (Config::IS_SMALL && !small_tiles_pay(p, Config::LARGER)) {
    return "larger tiles serve so many queries better";
  }
  if constexpr (Config::HAS_BIAS) return find_bias_problem<Config>(p);
  return find_problem<Config>(p, p.out);
}

template <class Config>
cudaError_t launch_fwd_sm90(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  using Call = std::conditional_t<Config::DROPS, FwdDropoutCall, FwdCall>;
  const auto& call = *static_cast<const Call*>(params);
  typename Config::Params all;
  FwdParams& p = all.p = call.params;
  if constexpr (Config::DROPS) all.dropout = call.params.dropout;
  if constexpr (Config::HAS_SCORE_MOD) all.score_mod = make_fwd_score_mod<typename Config::T>(p);
  if constexpr (Config::FINDS_MAX_LOGIT) {
    all.max_logit = static_cast<const FwdMaxLogitCall&>(call).max_logit;
  }
  const CallAxes axes(p);
  const int box_keys = p.mask.kind == MaskKind::TILES ? MASK_TILE : Config::BLOCK_N;
  const int rows = Config::BLOCK_M / Config::CONSUMERS;
  AxisSteps out_axes;
  const MapRequest maps[] = {
      {&all.q, &all.q_axes, &p.q, axes.rows_q, p.head_dim, &axes.q, Config::BLOCK_M},
      {&all.k, &all.k_axes, &p.k, axes.rows_k, p.head_dim, &axes.k, box_keys},
      {&all.v, &all.v_axes, &p.v, axes.rows_k, p.head_dim_v, &axes.k, box_keys},
      {&all.out, &out_axes, &p.out, axes.rows_q, p.head_dim_v, &axes.q, rows},
  };
  const cudaError_t status = make_maps<Config>(maps);
  if (status != cudaSuccess) return status;
  if constexpr (Config::HAS_BIAS) {
    all.bias_in_boxes = find_bias_map_problem(p) == nullptr;
    if (all.bias_in_boxes) {
      const cudaError_t of_bias = make_bias_map<Config>(all);
      if (of_bias != cudaSuccess) return of_bias;
    } else {
      all.bias_rows = p.bias.row == 0 ? 1 : Config::BLOCK_M;
    }
  }
  const FwdGrid grid(p, Config::BLOCK_M);
  const int64_t tiles = grid.tiles * grid.groups;
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  p.order = make_order(grid.tiles, grid.groups, p.heads_together);
  all.tiles = static_cast<int>(tiles);
  all.tickets = call.tickets;
  const bool shared = all.tickets != nullptr || is_even(p.mask, p.packing.cu_seqlens_q != nullptr);
  const int64_t blocks =
      shared ? std::min<int64_t>(tiles, int64_t{p.sm_count} * Config::MIN_BLOCKS) : tiles;
  return launch_1d(entry, &all, blocks, stream);
}

}  // namespace flash_dist

// The launch of the forward kernel for Hopper, and what it leaves to the general one.
#pragma once

#include "core/blocks.cuh"
#include "sm90/fwd/config.h"

namespace flash_dist {

// The row axis of q and out, of k and v, and their other axes.
struct FwdAxes {
  int rows_q, rows_k;
  Axes q, k;

  explicit FwdAxes(const FwdParams& p) {
    const bool packed = p.packing.cu_seqlens_q != nullptr;
    const int batches = packed ? 1 : p.batch;
    rows_q = packed ? p.total_q : p.seqlen_q;
    rows_k = packed ? p.total_k : p.seqlen_k;
    q = {p.group, p.num_heads_kv, batches};
    k = {1, p.num_heads_kv, batches};
  }
};

template <class Config>
const char* refuse_fwd_sm90(const void* params) {
  const FwdParams& p = *static_cast<const FwdParams*>(params);
  if (p.mask.kind == MaskKind::TILES && Config::LIST_N == 0) return "its tile takes no lists";
  const FwdAxes axes(p);
  const char* const problems[] = {
      find_map_problem(p.q, axes.rows_q, p.head_dim, axes.q),
      find_map_problem(p.k, axes.rows_k, p.head_dim, axes.k),
      find_map_problem(p.v, axes.rows_k, p.head_dim_v, axes.k),
      find_map_problem(p.out, axes.rows_q, p.head_dim_v, axes.q),
  };
  for (const char* problem : problems) {
    if (problem != nullptr) return problem;
  }
  return nullptr;
}

template <class Config>
cudaError_t launch_fwd_sm90(const void* kernel, const void* params, cudaStream_t stream) {
  const auto& call = *static_cast<const FwdCall*>(params);
  FwdSm90Params all;
  FwdParams& p = all.p = call.params;
  const FwdAxes axes(p);
  const Dtype dtype = std::is_same_v<typename Config::T, Fp16> ? Dtype::FP16 : Dtype::BF16;
  const int box_keys = p.mask.kind == MaskKind::TILES ? MASK_TILE : Config::BLOCK_N;
  const int rows = Config::BLOCK_M / Config::CONSUMERS;
  AxisSteps out_axes;
  struct {
    CUtensorMap* map;
    AxisSteps* steps;
    const View* view;
    int rows, columns;
    const Axes* axes;
    int box_rows;
  } const maps[] = {
      {&all.q, &all.q_axes, &p.q, axes.rows_q, p.head_dim, &axes.q, Config::BLOCK_M},
      {&all.k, &all.k_axes, &p.k, axes.rows_k, p.head_dim, &axes.k, box_keys},
      {&all.v, &all.v_axes, &p.v, axes.rows_k, p.head_dim_v, &axes.k, box_keys},
      {&all.out, &out_axes, &p.out, axes.rows_q, p.head_dim_v, &axes.q, rows},
  };
  for (const auto& one : maps) {
    const cudaError_t status = make_map(one.map, one.steps, *one.view, dtype, one.rows, one.columns,
                                        *one.axes, one.box_rows);
    if (status != cudaSuccess) return status;
  }
  const FwdGrid grid(p, Config::BLOCK_M);
  const int64_t tiles = grid.tiles * grid.groups;
  if (tiles == 0) return cudaSuccess;
  if (tiles > INT32_MAX) return cudaErrorInvalidConfiguration;
  p.order = make_order(grid.tiles, grid.groups, p.heads_together);
  all.tiles = static_cast<int>(tiles);
  all.tickets = call.tickets;
  const bool shared = all.tickets != nullptr || is_even(p.mask, p.packing.cu_seqlens_q != nullptr);
  const int64_t blocks = shared ? std::min<int64_t>(tiles, call.sm_count) : tiles;
  return launch_1d<Config>(kernel, &all, blocks, stream);
}

}  // namespace flash_dist

// The launches of the backward kernels for Hopper, and what they leave to the general ones.
#pragma once

#include "core/blocks.cuh"
#include "sm90/axes.h"
#include "sm90/bwd/config.h"

namespace flash_dist {

template <class Config>
constexpr Dtype DTYPE = std::is_same_v<typename Config::T, Fp16> ? Dtype::FP16 : Dtype::BF16;

template <class Config, class Params, class Grid>
cudaError_t launch_grid(const void* kernel, Params& all, const Grid& grid, cudaStream_t stream) {
  const int64_t blocks = grid.tiles * grid.groups;
  if (0 < blocks && blocks <= INT32_MAX) {
    all.p.order = make_order(grid.tiles, grid.groups, all.p.heads_together);
  }
  return launch_1d<Config>(kernel, &all, blocks, stream);
}

template <class Config>
const char* refuse_dkdv_sm90(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  const CallAxes axes(p);
  const char* const problems[] = {
      find_map_problem(p.q, axes.rows_q, p.head_dim, axes.q),
      find_map_problem(p.k, axes.rows_k, p.head_dim, axes.k),
      find_map_problem(p.v, axes.rows_k, p.head_dim_v, axes.k),
      find_map_problem(p.dout, axes.rows_q, p.head_dim_v, axes.q),
  };
  for (const char* problem : problems) {
    if (problem != nullptr) return problem;
  }
  return nullptr;
}

template <class Config>
cudaError_t launch_dkdv_sm90(const void* kernel, const void* params, cudaStream_t stream) {
  DkdvSm90Params all;
  BwdParams& p = all.p = *static_cast<const BwdParams*>(params);
  const CallAxes axes(p);
  struct {
    CUtensorMap* map;
    AxisSteps* steps;
    const View* view;
    int rows, columns;
    const Axes* axes;
    int box_rows;
  } const maps[] = {
      {&all.q, &all.q_axes, &p.q, axes.rows_q, p.head_dim, &axes.q, Config::BLOCK_M},
      {&all.k, &all.k_axes, &p.k, axes.rows_k, p.head_dim, &axes.k, Config::BLOCK_N},
      {&all.v, &all.v_axes, &p.v, axes.rows_k, p.head_dim_v, &axes.k, Config::BLOCK_N},
      {&all.dout, &all.dout_axes, &p.dout, axes.rows_q, p.head_dim_v, &axes.q, Config::BLOCK_M},
  };
  for (const auto& one : maps) {
    const cudaError_t status = make_map(one.map, one.steps, *one.view, DTYPE<Config>, one.rows,
                                        one.columns, *one.axes, one.box_rows);
    if (status != cudaSuccess) return status;
  }
  return launch_grid<Config>(kernel, all, DkdvGrid(p, Config::BLOCK_N), stream);
}

template <class Config>
const char* refuse_dq_gemm_sm90(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  const CallAxes axes(p);
  return find_map_problem(p.k, axes.rows_k, p.head_dim, axes.k);
}

template <class Config>
cudaError_t launch_dq_gemm_sm90(const void* kernel, const void* params, cudaStream_t stream) {
  DqSm90Params all;
  BwdParams& p = all.p = *static_cast<const BwdParams*>(params);
  const CallAxes axes(p);
  const cudaError_t status =
      make_map(&all.k, &all.k_axes, p.k, DTYPE<Config>, axes.rows_k, p.head_dim, axes.k, DS_TILE);
  if (status != cudaSuccess) return status;
  return launch_grid<Config>(kernel, all, DqGrid(p, Config::BLOCK_M), stream);
}

}  // namespace flash_dist

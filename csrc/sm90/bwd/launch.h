// Launches the backward kernels for Hopper, and decides which calls are left to the general
// kernels.
#pragma once

#include "core/blocks.cuh"
#include "sm90/axes.h"
#include "sm90/bwd/config.h"

namespace flash_dist {

template <class Config>
const char* refuse_dkdv_sm90(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  return find_problem<Config>(p, p.dout);
}

// Makes the tensor maps of a dK/dV kernel.
template <class Config>
cudaError_t make_dkdv_maps(DkdvSm90Params& all) {
  const BwdParams& p = all.p;
  const CallAxes axes(p);
  const MapRequest maps[] = {
      {&all.q, &all.q_axes, &p.q, axes.rows_q, p.head_dim, &axes.q, Config::BLOCK_M},
      {&all.k, &all.k_axes, &p.k, axes.rows_k, p.head_dim, &axes.k, Config::BLOCK_N},
      {&all.v, &all.v_axes, &p.v, axes.rows_k, p.head_dim_v, &axes.k, Config::BLOCK_N},
      {&all.dout, &all.dout_axes, &p.dout, axes.rows_q, p.head_dim_v, &axes.q, Config::BLOCK_M},
  };
  return make_maps<Config>(maps);
}

template <class Config>
cudaError_t launch_dkdv_sm90(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  typename Config::Params all;
  BwdParams& p = all.p = *static_cast<const BwdParams*>(params);
  if constexpr (Config::DROPS) all.dropout = static_cast<const BwdDropoutParams*>(params)->dropout;
  if constexpr (Config::HAS_SCORE_MOD) all.score_mod = make_score_mod(p);
  const cudaError_t status = make_dkdv_maps<Config>(all);
  if (status != cudaSuccess) return status;
  if constexpr (Config::BIAS_IN_BOXES) {
    const cudaError_t of_bias = make_bias_map<Config>(all);
    if (of_bias != cudaSuccess) return of_bias;
  }
  return launch_in_order(entry, p, DkdvGrid(p, Config::BLOCK_N), all, stream);
}

template <class Config>
const char* refuse_dq_gemm_sm90(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  const CallAxes axes(p);
  return find_map_problem(p.k, axes.rows_k, p.head_dim, axes.k);
}

template <class Config>
cudaError_t launch_dq_gemm_sm90(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  DqSm90Params all;
  BwdParams& p = all.p = *static_cast<const BwdParams*>(params);
  const CallAxes axes(p);
  const MapRequest maps[] = {
      {&all.k, &all.k_axes, &p.k, axes.rows_k, p.head_dim, &axes.k, DS_TILE}};
  const cudaError_t status = make_maps<Config>(maps);
  if (status != cudaSuccess) return status;
  return launch_in_order(entry, p, DqGrid(p, Config::BLOCK_M), all, stream);
}

}  // namespace flash_dist

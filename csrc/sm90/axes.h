// Tensor maps of a call, and the reasons why the Hopper kernels do not serve a call.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/maps.h"
#include "ptx/elements.h"

namespace flash_dist {

// Axes of the tensors. rows_q and q are those of q, out and dout; rows_k and k those of k and v.
struct CallAxes {
  int rows_q, rows_k;
  Axes q, k;

  template <class Params>  // FwdParams or BwdParams
  explicit CallAxes(const Params& p) {
    const bool packed = p.packing.cu_seqlens_q != nullptr;
    const int batches = packed ? 1 : p.batch;
    rows_q = packed ? p.total_q : p.seqlen_q;
    rows_k = packed ? p.total_k : p.seqlen_k;
    q = {p.group, p.num_heads_kv, batches};
    k = {1, p.num_heads_kv, batches};
  }
};

// A bias as a tensor of 16-bit columns. An fp32 bias has two columns per key.
struct BiasTensor {
  View view;
  Axes axes;
  int rows, columns;

  template <class Params>  // FwdParams or BwdParams
  explicit BiasTensor(const Params& p) {
    const BiasParams& bias = p.bias;
    const int width = bias.is_fp32 ? 2 : 1;
    view = {const_cast<void*>(bias.data), bias.batch * width, bias.row * width, bias.head * width,
            0};
    axes = {1, p.num_heads_kv * p.group, p.batch};
    rows = bias.row == 0 ? 1 : p.seqlen_q;
    columns = p.seqlen_k * width;
  }
};

// Returns why no tensor map can describe the bias; null if one can.
template <class Params>
const char* find_bias_map_problem(const Params& p) {
  if (p.bias.key != 1 || p.seqlen_k > INT32_MAX / 2) return "keys of the bias are not neighbours";
  const BiasTensor bias(p);
  return find_map_problem(bias.view, bias.rows, bias.columns, bias.axes);
}

// Returns why the kernels of Config cannot serve a call; null if they can. like_out: out or dout.
template <class Config, class Params>  // FwdParams or BwdParams
const char* find_problem(const Params& p, const View& like_out, const CallAxes& axes) {
  if (p.scores.has_score_mod && !Config::HAS_SCORE_MOD)
    return "it neither caps scores nor has ALiBi";
  if (!p.scores.has_score_mod && Config::HAS_SCORE_MOD)
    return "it is for calls with a soft cap or ALiBi";
  if (p.bias.data != nullptr) return "it adds no bias";
  if (p.scores.softcap > FAST_CAP) return "its tanh is too coarse for a soft cap above 100";
  const float inside = std::abs(p.scores.scale_inside);
  if (p.scores.softcap != 0.0f && (inside < LEAST_INSIDE || inside > LARGEST_INSIDE)) {
    return "its tanh has no terms for such a quotient of the scale and the soft cap";
  }
  const char* const problems[] = {
      find_map_problem(p.q, axes.rows_q, p.head_dim, axes.q),
      find_map_problem(p.k, axes.rows_k, p.head_dim, axes.k),
      find_map_problem(p.v, axes.rows_k, p.head_dim_v, axes.k),
      find_map_problem(like_out, axes.rows_q, p.head_dim_v, axes.q),
  };
  for (const char* problem : problems) {
    if (problem != nullptr) return problem;
  }
  return nullptr;
}

template <class Config, class Params>
const char* find_problem(const Params& p, const View& like_out) {
  return find_problem<Config>(p, like_out, CallAxes(p));
}

// Like find_problem(), for kernels that add a bias. Does not check how the bias is stored.
template <class Config, class Params>
const char* find_problem_beside_bias(Params p, const View& like_out) {
  if (p.bias.data == nullptr) return "it is for calls with a bias";
  if (p.scores.alibi != nullptr || p.scores.softcap != 0.0f) {
    return "it has neither ALiBi nor a soft cap beside a bias";
  }
  p.scores.has_score_mod = 0;
  p.bias = {};
  return find_problem<Config>(p, like_out);
}

// Arguments of make_maps() for the tensor map of one view, with boxes of box_rows rows.
struct MapRequest {
  CUtensorMap* map;
  AxisSteps* steps;
  const View* view;
  int rows, columns;
  const Axes* axes;
  int box_rows;
};

template <class Config, size_t COUNT>
cudaError_t make_maps(const MapRequest (&requests)[COUNT]) {
  constexpr Dtype DTYPE = std::is_same_v<typename Config::T, Fp16> ? Dtype::FP16 : Dtype::BF16;
  for (const MapRequest& one : requests) {
    const cudaError_t status = make_map(one.map, one.steps, *one.view, DTYPE, one.rows, one.columns,
                                        *one.axes, one.box_rows);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

// Makes the tensor map of the bias. Stores the map, and its rows per box, in `all`.
template <class Config, class Params>
cudaError_t make_bias_map(Params& all) {
  const BiasTensor bias(all.p);
  all.bias_rows = all.p.bias.row == 0 ? 1 : Config::BLOCK_M;
  const MapRequest map[] = {
      {&all.bias, &all.bias_axes, &bias.view, bias.rows, bias.columns, &bias.axes, all.bias_rows}};
  return make_maps<Config>(map);
}

}  // namespace flash_dist

// Settings that all kernel configurations share.
#pragma once

#include "ptx/elements.h"

namespace flash_dist {

// Number of steps of a matrix product whose operands ptxas may load ahead. Before sm_80 it is
// smaller, because tiles are staged in registers.
template <class Target>
constexpr int STEPS_AHEAD = Target::HAS_CP_ASYNC ? 4 : 2;

// The compile-time settings of one variant of a kernel.
template <class Plan_, class Target_, class T_, int HEAD_DIM_, int HEAD_DIM_V_>
struct Config : Plan_ {
  using Plan = Plan_;
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;      // columns of q and k
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;  // columns of v and out
  static constexpr int THREADS = Plan::WARPS * 32;
  // Kernels with dropout take FwdDropoutParams, BwdDropoutParams and so on. These kernels have no
  // soft cap.
  static constexpr bool DROPS = false;
  // True if several blocks of the same keys may split the queries, see BwdParams::query_split.
  static constexpr bool SHARES_QUERIES = false;
};

}  // namespace flash_dist

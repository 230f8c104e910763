// What the configurations of all kernels have in common.
#pragma once

#include "ptx/elements.h"

namespace flash_dist {

// Steps of a product that ptxas may load ahead: fewer where registers stage the tiles.
template <class Target>
constexpr int STEPS_AHEAD = Target::HAS_CP_ASYNC ? 4 : 2;

// The compile-time choices behind one variant, for every kernel.
template <class Plan_, class Target_, class T_, int HEAD_DIM_, int HEAD_DIM_V_>
struct Config : Plan_ {
  using Plan = Plan_;
  using Target = Target_;
  using T = T_;
  static constexpr int HEAD_DIM = HEAD_DIM_;      // of q and k
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;  // of v and out
  static constexpr int THREADS = Plan::WARPS * 32;
  // Whether blocks of the same keys may share the queries: BwdParams::query_split.
  static constexpr bool SHARES_QUERIES = false;
};

}  // namespace flash_dist

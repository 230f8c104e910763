// What the configurations of all kernels have in common.
#pragma once

#include "ptx/target.h"

namespace flash_dist {

// What every kernel's configuration has: the compile-time choices behind one variant.
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

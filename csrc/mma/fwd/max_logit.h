// The kernel that finds the largest score of each query head, for 16-bit dtypes. See
// core/max_logit_block.cuh.
#pragma once

#include "core/max_logit_block.cuh"
#include "max_logit_plans.h"
#include "mma/columns.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using MaxLogitConfig = AnyMaxLogitConfig<MaxLogitPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                         HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Config>
__device__ __forceinline__ void max_logit_block(const MaxLogitParams& params) {
  find_max_logit<Config, ColumnProducts<Config>>(params);
}

}  // namespace flash_dist

// The kernel that finds the largest score of each query head, for fp32. See
// core/max_logit_block.cuh.
#pragma once

#include "core/max_logit_block.cuh"
#include "f32/columns.cuh"
#include "max_logit_plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32MaxLogitConfig = AnyMaxLogitConfig<F32MaxLogitPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                            HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32MaxLogitConfig = AnyMaxLogitConfig<Ieee32MaxLogitPlan<HEAD_DIM, HEAD_DIM_V, PLAN>,
                                               Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Config>
__device__ __forceinline__ void f32_max_logit_block(const MaxLogitParams& params) {
  find_max_logit<Config, F32ColumnProducts<Config>>(params);
}

}  // namespace flash_dist

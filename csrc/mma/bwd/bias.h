// The bias gradient kernel for 16-bit dtypes, see core/bias_gradient.cuh.
#pragma once

#include "core/bias_gradient.cuh"
#include "mma/columns.cuh"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using BiasConfig =
    AnyBiasConfig<BiasPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Config>
__device__ __forceinline__ void bias_block(const BiasGradientParams& p) {
  bias_gradient_block<Config, ColumnProducts<Config>>(p);
}

}  // namespace flash_dist

// The bias gradient kernel for fp32, see core/bias_gradient.cuh.
#pragma once

#include "core/bias_gradient.cuh"
#include "f32/columns.cuh"
#include "plans.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32BiasConfig =
    AnyBiasConfig<F32BiasPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using Ieee32BiasConfig = AnyBiasConfig<Ieee32BiasPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                       HEAD_DIM, HEAD_DIM_V, PLAN>;

template <class Config>
__device__ __forceinline__ void f32_bias_block(const BiasGradientParams& p) {
  bias_gradient_block<Config, F32ColumnProducts<Config>>(p);
}

}  // namespace flash_dist

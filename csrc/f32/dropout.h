// Configurations of the fp32 kernels with dropout.
#pragma once

#include "dropout_plans.h"
#include "f32/bwd/bias.h"
#include "f32/bwd/dkdv.h"
#include "f32/bwd/dq_recompute.h"
#include "f32/fwd/kernel.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32FwdDropoutConfig = F32FwdTiles<F32FwdDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                        HEAD_DIM, HEAD_DIM_V, PLAN, true>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32DkdvDropoutConfig = F32DkdvTiles<F32DkdvDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                          HEAD_DIM, HEAD_DIM_V, PLAN, true>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32DqRecomputeDropoutConfig =
    F32DqRecomputeTiles<F32DqRecomputeDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN, true>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using F32BiasDropoutConfig = AnyBiasConfig<F32BiasDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target,
                                           T, HEAD_DIM, HEAD_DIM_V, PLAN, true>;

}  // namespace flash_dist

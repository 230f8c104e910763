// The mma.sync kernels with dropout. Other features are chosen at run time, so that there are few
// kernels.
#pragma once

#include "dropout_plans.h"
#include "mma/bwd/bias.h"
#include "mma/bwd/dkdv.h"
#include "mma/bwd/dq_recompute.h"
#include "mma/fwd/kernel.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using FwdDropoutConfig = FwdConfigOf<FwdDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                     HEAD_DIM, HEAD_DIM_V, PLAN, true>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DkdvDropoutConfig = DkdvConfigOf<DkdvDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                       HEAD_DIM, HEAD_DIM_V, PLAN, true>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using DqRecomputeDropoutConfig =
    DqRecomputeConfigOf<DqRecomputeDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN, true>;

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
using BiasDropoutConfig = AnyBiasConfig<BiasDropoutPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                        HEAD_DIM, HEAD_DIM_V, PLAN, true>;

}  // namespace flash_dist

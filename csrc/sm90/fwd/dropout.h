// The forward kernel for Hopper with dropout.
#pragma once

#include "dropout_plans.h"
#include "sm90/fwd/kernel.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdDropoutSm90Config
    : FwdSm90ConfigOf<FwdDropoutSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                      HEAD_DIM_V, PLAN, FwdDropoutSm90Params> {};

}  // namespace flash_dist

// The forward kernel for Hopper that also finds the largest score of each query head.
#pragma once

#include "max_logit_plans.h"
#include "sm90/fwd/kernel.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FwdMaxLogitSm90Config
    : FwdSm90ConfigOf<FwdMaxLogitSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                      HEAD_DIM_V, PLAN, FwdMaxLogitSm90Params> {};

}  // namespace flash_dist

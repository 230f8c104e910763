// The fused backward for Hopper with dropout.
#pragma once

#include "dropout_plans.h"
#include "sm90/bwd_fused/kernel.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FusedDropoutSm90Config
    : FusedSm90ConfigOf<FusedDropoutSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN, false, true> {};

}  // namespace flash_dist

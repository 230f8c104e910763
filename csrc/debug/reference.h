// Attention and its gradients in float64, from the formulas.
#pragma once

#include "tensors.h"

namespace flash_dist::debug {

// inputs: rounded to the call's dtype, on the device that computes.
Outputs reference(const Options& options, const Inputs& inputs);

}  // namespace flash_dist::debug

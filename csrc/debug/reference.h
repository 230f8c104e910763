// Computes attention and its gradients in float64 from their formulas, and compares tensors with
// these results.
#pragma once

#include <string>

#include "tensors.h"

namespace flash_dist::debug {

// Returns the exact outputs for inputs that are rounded to the call's dtype. Computes on the device
// of the inputs.
Outputs reference(const Options& options, const Inputs& inputs);

struct Difference {
  double max_error = 0;  // max |value - expected|; inf for a NaN or an unexpected infinity
  double relative = 0;   // norm of the error over the norm of the expected tensor
  double tolerance = 0;  // largest absolute error allowed
  int64_t beyond = 0;    // number of elements with a larger error
  std::string first;     // "dk[0, 17, 3, 5] is 0.25, should be 0.5"; empty: none
  explicit operator bool() const { return beyond == 0; }
};

// Compares a tensor with the expected one. tolerance: relative to the greatest magnitude in
// `expected`.
Difference compare(const std::string& name, const at::Tensor& value, const at::Tensor& expected,
                   double tolerance);

// Returns an empty string if all bits agree; else describes how many elements differ, and the first
// one.
std::string compare_bits(const std::string& name, const at::Tensor& value,
                         const at::Tensor& expected);

}  // namespace flash_dist::debug

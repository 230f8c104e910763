// Attention and its gradients in float64, from the formulas, and how far a tensor is from them.
#pragma once

#include <string>

#include "tensors.h"

namespace flash_dist::debug {

// inputs: rounded to the call's dtype, on the device that computes.
Outputs reference(const Options& options, const Inputs& inputs);

struct Difference {
  double max_error = 0;  // greatest |value - expected|; inf where only one of them is NaN or inf
  double relative = 0;   // norm of the error over the norm of the expected tensor
  double tolerance = 0;  // as an absolute error
  int64_t beyond = 0;    // elements whose error exceeds it
  std::string first;     // "dk[0, 17, 3, 5] is 0.25, should be 0.5"; empty: none
  explicit operator bool() const { return beyond == 0; }
};

// tolerance: as a part of the greatest expected magnitude.
Difference compare(const std::string& name, const at::Tensor& value, const at::Tensor& expected,
                   double tolerance);

// Empty if all bits agree, else how many elements differ and the first of them.
std::string compare_bits(const std::string& name, const at::Tensor& value,
                         const at::Tensor& expected);

}  // namespace flash_dist::debug

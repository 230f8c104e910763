// Calls the kernels of flash_dist through the C interface, on torch's default stream.
#pragma once

#include <string>
#include <vector>

#include "../host/capi.h"
#include "tensors.h"

namespace flash_dist::debug {

// Error with the message of flash_dist_last_error(), for a call that the library refused.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Kernels {
 public:
  // inputs must be on the GPU that `options` names.
  Kernels(const Options& options, const Inputs& inputs);

  // If `dirty`, new tensors are filled with NaN. This reveals elements that a kernel reads too
  // early or does not write at all.
  void set_dirty(bool dirty) { dirty_ = dirty; }

  void forward(Outputs& outputs);
  void backward(Outputs& outputs);  // call forward() first

 private:
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);
  static void* allocate(void* self, int64_t bytes);
  View view(const at::Tensor& t, int heads_per_kv) const;
  MaskParams mask_params();
  template <class Params>
  Params params() const;  // parameters that forward and backward share

  const Options& options_;
  const Inputs& inputs_;
  Call call_{};
  RowArrays arrays_;                // arrays of the mask, unless it is a band
  std::vector<at::Tensor> on_gpu_;  // copies of arrays_
  MaskParams mask_{};
  at::Tensor workspace_;
  bool dirty_ = false;
};

// Returns the symbols of the last launched kernels, to set breakpoints on.
std::vector<std::string> last_kernels();

}  // namespace flash_dist::debug

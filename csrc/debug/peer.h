// Runs torch's scaled_dot_product_attention, to compare its time and its error with those of
// flash_dist's kernels. Both errors are relative to float64.
#pragma once

#include <string>

#include "tensors.h"

namespace flash_dist::debug {

class Peer {
 public:
  Peer(const Options& options, const Inputs& inputs);

  // Returns "scaled_dot_product_attention" and the name of the backend that torch chooses.
  std::string name() const;
  void forward();
  void backward();  // call record() first
  void record();    // runs a forward and keeps its graph; backward() can then run many times
  Outputs outputs() const;

 private:
  at::Tensor attend() const;

  const Options& options_;
  at::Tensor q_, k_, v_, dout_;  // [batch, num_heads, seqlen, columns]
  std::optional<at::Tensor> visible_;
  bool is_causal_ = false, enable_gqa_ = false;
  at::Tensor out_;
  std::vector<at::Tensor> gradients_;
};

}  // namespace flash_dist::debug

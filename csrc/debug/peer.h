// torch's own attention, to compare times and errors against float64.
#pragma once

#include <string>

#include "tensors.h"

namespace flash_dist::debug {

class Peer {
 public:
  Peer(const Options& options, const Inputs& inputs);

  // at::scaled_dot_product_attention, and the backend that torch chooses.
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

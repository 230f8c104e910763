// torch's own attention, for times and for how far its bits are from float64.
#pragma once

#include <string>

#include "tensors.h"

namespace flash_dist::debug {

class Peer {
 public:
  Peer(const Options& options, const Inputs& inputs);

  // at::scaled_dot_product_attention and the backend that torch chooses for it.
  std::string name() const;
  void forward();
  void backward();  // after record
  void record();    // a forward whose graph backward runs through, again and again
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

#include "peer.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

namespace flash_dist::debug {

namespace {

at::Tensor leaf(const at::Tensor& t) { return t.transpose(1, 2).detach().set_requires_grad(true); }

const char* backend_name(int64_t choice) {
  switch (choice) {
    case 0:
      return "math";
    case 1:
      return "flash";
    case 2:
      return "efficient";
    case 3:
      return "cudnn";
  }
  return "another backend";
}

}  // namespace

Peer::Peer(const Options& options, const Inputs& in)
    : options_(options), q_(leaf(in.q)), dout_(in.dout.transpose(1, 2)) {
  const Mask& mask = options.mask;
  const bool full = mask.form == Mask::Form::BAND && mask.left < 0 && mask.right < 0;
  const bool causal = mask.form == Mask::Form::BAND && mask.left < 0 && mask.right == 0;
  is_causal_ = causal && (!mask.bottom_right || options.seqlen_q == options.seqlen_k);
  if (!full && !is_causal_) visible_ = make_visible(options, in.q.device());
  // With a mask, torch's fast backends do not support grouped heads, so k and v heads are repeated.
  enable_gqa_ = options.group() > 1 && !visible_;
  const auto spread = [&](const at::Tensor& t) {
    return options.group() > 1 && visible_ ? t.repeat_interleave(options.group(), 2) : t;
  };
  k_ = leaf(spread(in.k));
  v_ = leaf(spread(in.v));
}

std::string Peer::name() const {
  const int64_t choice = at::_fused_sdp_choice(q_, k_, v_, visible_, 0.0, is_causal_,
                                               options_.softmax_scale, enable_gqa_);
  return std::string("scaled_dot_product_attention, ") + backend_name(choice);
}

at::Tensor Peer::attend() const {
  return at::scaled_dot_product_attention(q_, k_, v_, visible_, 0.0, is_causal_,
                                          options_.softmax_scale, enable_gqa_);
}

void Peer::forward() {
  const c10::AutoGradMode no_graph(false);
  attend();
}

void Peer::record() { out_ = attend(); }

void Peer::backward() {
  gradients_ = torch::autograd::grad({out_}, {q_, k_, v_}, {dout_}, /*retain_graph=*/true);
}

Outputs Peer::outputs() const {
  const bool spread = visible_ && options_.group() > 1;
  const auto gather = [&](const at::Tensor& t) {
    const at::Tensor heads = t.transpose(1, 2);
    return spread ? heads.unflatten(2, {options_.num_heads_kv, options_.group()}).sum(3) : heads;
  };
  Outputs outputs;
  outputs.out = out_.detach().transpose(1, 2);
  if (gradients_.empty()) return outputs;
  outputs.dq = gradients_[0].transpose(1, 2);
  outputs.dk = gather(gradients_[1]);
  outputs.dv = gather(gradients_[2]);
  return outputs;
}

}  // namespace flash_dist::debug

// The tensors of one attention call, in the order in which they are printed.
#pragma once

#include <ATen/ATen.h>

#include "options.h"

namespace flash_dist::debug {

struct Inputs {
  at::Tensor q;     // [batch, seqlen_q, num_heads_q, head_dim]
  at::Tensor k;     // [batch, seqlen_k, num_heads_kv, head_dim]
  at::Tensor v;     // [batch, seqlen_k, num_heads_kv, head_dim_v]
  at::Tensor dout;  // [batch, seqlen_q, num_heads_q, head_dim_v]
};

// Tensors that were not computed are undefined.
struct Outputs {
  at::Tensor out;  // [batch, seqlen_q, num_heads_q, head_dim_v]
  at::Tensor lse;  // [batch, num_heads_q, seqlen_q]
  at::Tensor dq, dk, dv;
};

struct Named {
  const char* name;
  at::Tensor Outputs::* tensor;
};
inline constexpr Named OUTPUTS[] = {{"out", &Outputs::out},
                                    {"lse", &Outputs::lse},
                                    {"dq", &Outputs::dq},
                                    {"dk", &Outputs::dk},
                                    {"dv", &Outputs::dv}};

// Draws the inputs. They are the same as those of this Python program on the CPU:
//
//   torch.manual_seed(seed)
//   q, k, v, dout = (torch.randn(shape).to(dtype) for shape in (q_shape, k_shape, ...))
//
// One mt19937 generator draws all four tensors, in this order, in float32.
Inputs make_inputs(const Options& options);

// Returns booleans [seqlen_q, seqlen_k], true where a key is visible to a query.
at::Tensor make_visible(const Options& options, at::Device device);

}  // namespace flash_dist::debug

#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>

namespace flash_dist::debug {

namespace {

at::ScalarType scalar_type(const std::string& dtype) {
  if (dtype == "fp32" || dtype == "ieee32") return at::kFloat;
  return dtype == "fp16" ? at::kHalf : at::kBFloat16;
}

}  // namespace

Inputs make_inputs(const Options& o) {
  const at::Generator generator = at::detail::createCPUGenerator(o.seed);
  const auto draw = [&](int seqlen, int num_heads, int head_dim) {
    return at::randn({o.batch, seqlen, num_heads, head_dim}, generator, at::kFloat)
        .to(scalar_type(o.dtype));
  };
  Inputs inputs;
  inputs.q = draw(o.seqlen_q, o.num_heads_q, o.head_dim);
  inputs.k = draw(o.seqlen_k, o.num_heads_kv, o.head_dim);
  inputs.v = draw(o.seqlen_k, o.num_heads_kv, o.head_dim_v);
  inputs.dout = draw(o.seqlen_q, o.num_heads_q, o.head_dim_v);
  return inputs;
}

at::Tensor make_visible(const Options& o, at::Device device) {
  const at::Tensor keys = at::empty({o.seqlen_q, 2}, at::kInt);
  int* write = keys.data_ptr<int>();
  for (int i = 0; i < o.seqlen_q; ++i) {
    const Keys seen = visible_keys(o.mask, i, o.seqlen_q, o.seqlen_k);
    *write++ = seen.begin;
    *write++ = seen.end;
  }
  const at::Tensor bounds = keys.to(device);
  const at::Tensor key = at::arange(o.seqlen_k, bounds.options()).unsqueeze(0);
  return key.ge(bounds.slice(1, 0, 1)).logical_and(key.lt(bounds.slice(1, 1, 2)));
}

}  // namespace flash_dist::debug

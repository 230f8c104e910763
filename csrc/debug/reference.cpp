#include "reference.h"

#include <limits>
#include <sstream>
#include <vector>

namespace flash_dist::debug {

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

// The tensors of one query head, as float64 matrices.
struct Head {
  at::Tensor q, k, v, dout;       // [seqlen, columns]
  at::Tensor out, lse;            // output
  at::Tensor dq, dk_sum, dv_sum;  // dq is an output, the sums are accumulated
};

void attend(const Head& h, const at::Tensor& hidden, double softmax_scale, bool forward_only) {
  const at::Tensor scores = h.q.mm(h.k.t()).mul_(softmax_scale).masked_fill_(hidden, -INFINITE);
  const at::Tensor lse = at::logsumexp(scores, {-1});
  h.lse.copy_(lse);
  // Avoids inf - inf in rows without keys.
  const at::Tensor finite = lse.masked_fill(lse.eq(-INFINITE), 0);
  const at::Tensor p = scores.sub(finite.unsqueeze(-1)).exp_();
  h.out.copy_(p.mm(h.v));
  if (forward_only) return;
  const at::Tensor delta = h.dout.mul(h.out).sum(-1, true);
  const at::Tensor ds = h.dout.mm(h.v.t()).sub_(delta).mul_(p).mul_(softmax_scale);
  h.dq.copy_(ds.mm(h.k));
  h.dk_sum.add_(ds.t().mm(h.q));
  h.dv_sum.add_(p.t().mm(h.dout));
}

// Describes the first element whose flag is set. At least one flag must be set.
std::string describe_first(const std::string& name, const at::Tensor& flags,
                           const at::Tensor& value, const at::Tensor& expected) {
  const int64_t flat = flags.flatten().nonzero()[0].item<int64_t>();
  std::vector<int64_t> coordinates;
  int64_t rest = flat;
  for (int64_t axis = flags.dim() - 1; axis >= 0; --axis) {
    coordinates.insert(coordinates.begin(), rest % flags.size(axis));
    rest /= flags.size(axis);
  }
  const auto at_first = [&](const at::Tensor& t) {
    return t.flatten()[flat].to(at::kDouble).item<double>();
  };
  std::ostringstream text;
  text.precision(9);
  text << name << "[";
  for (size_t axis = 0; axis < coordinates.size(); ++axis)
    text << (axis == 0 ? "" : ", ") << coordinates[axis];
  text << "] is " << at_first(value) << ", should be " << at_first(expected);
  return text.str();
}

at::Tensor bits(const at::Tensor& t) {
  return t.contiguous().view(t.element_size() == 2 ? at::kShort : at::kInt);
}

}  // namespace

Outputs reference(const Options& o, const Inputs& in) {
  const at::Tensor hidden = make_visible(o, in.q.device()).logical_not();
  const auto exact = in.q.options().dtype(at::kDouble);
  Outputs sums;
  sums.out = at::zeros(in.dout.sizes(), exact);
  sums.lse = at::zeros({o.batch, o.num_heads_q, o.seqlen_q}, exact);
  sums.dq = at::zeros(in.q.sizes(), exact);
  sums.dk = at::zeros(in.k.sizes(), exact);
  sums.dv = at::zeros(in.v.sizes(), exact);
  for (int batch = 0; batch < o.batch; ++batch) {
    const auto head = [&](const at::Tensor& t, int index) { return t[batch].select(1, index); };
    for (int i = 0; i < o.num_heads_q; ++i) {
      const int kv = i / o.group();
      const auto rounded = [&](const at::Tensor& t, int index) {
        return head(t, index).to(at::kDouble);
      };
      attend({rounded(in.q, i), rounded(in.k, kv), rounded(in.v, kv), rounded(in.dout, i),
              head(sums.out, i), sums.lse[batch][i], head(sums.dq, i), head(sums.dk, kv),
              head(sums.dv, kv)},
             hidden, o.softmax_scale, o.forward_only);
    }
  }
  if (o.forward_only) sums.dq = sums.dk = sums.dv = at::Tensor();
  return sums;
}

Difference compare(const std::string& name, const at::Tensor& value, const at::Tensor& expected,
                   double tolerance) {
  const at::Tensor exact = expected.to(value.device());
  const at::Tensor got = value.to(at::kDouble);
  // An infinity that is expected has error 0. A NaN, or any other infinity, has an infinite
  // error.
  const at::Tensor error =
      got.sub(exact).abs().masked_fill(got.eq(exact), 0).nan_to_num(INFINITE, INFINITE);
  const at::Tensor finite = exact.masked_fill(exact.isfinite().logical_not(), 0);

  Difference difference;
  difference.max_error = error.max().item<double>();
  difference.relative = error.norm().item<double>() / finite.norm().item<double>();
  difference.tolerance = tolerance * finite.abs().max().item<double>();
  const at::Tensor beyond = error.gt(difference.tolerance);
  difference.beyond = beyond.sum().item<int64_t>();
  if (difference.beyond > 0) difference.first = describe_first(name, beyond, value, exact);
  return difference;
}

std::string compare_bits(const std::string& name, const at::Tensor& value,
                         const at::Tensor& expected) {
  const at::Tensor differ = bits(value).ne(bits(expected));
  const int64_t count = differ.sum().item<int64_t>();
  if (count == 0) return "";
  return std::to_string(count) + " of " + std::to_string(differ.numel()) +
         " elements: " + describe_first(name, differ, value, expected);
}

}  // namespace flash_dist::debug

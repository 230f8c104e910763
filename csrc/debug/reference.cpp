#include "reference.h"

#include <limits>

namespace flash_dist::debug {

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

// One query head: everything as matrices of float64.
struct Head {
  at::Tensor q, k, v, dout;       // [seqlen, columns]
  at::Tensor out, lse;            // written
  at::Tensor dq, dk_sum, dv_sum;  // written, added to, added to
};

void attend(const Head& h, const at::Tensor& hidden, double softmax_scale, bool forward_only) {
  const at::Tensor scores = h.q.mm(h.k.t()).mul_(softmax_scale).masked_fill_(hidden, -INFINITE);
  const at::Tensor lse = at::logsumexp(scores, {-1});
  h.lse.copy_(lse);
  const at::Tensor finite = lse.masked_fill(lse.eq(-INFINITE), 0);  // rows without a key
  const at::Tensor p = scores.sub(finite.unsqueeze(-1)).exp_();
  h.out.copy_(p.mm(h.v));
  if (forward_only) return;
  const at::Tensor delta = h.dout.mul(h.out).sum(-1, true);
  const at::Tensor ds = h.dout.mm(h.v.t()).sub_(delta).mul_(p).mul_(softmax_scale);
  h.dq.copy_(ds.mm(h.k));
  h.dk_sum.add_(ds.t().mm(h.q));
  h.dv_sum.add_(p.t().mm(h.dout));
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

}  // namespace flash_dist::debug

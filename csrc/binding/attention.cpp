// Declares and implements the torch operators of attention, with torch's stable ABI. The operators
// allocate outputs and workspace with torch's allocator, and launch on the current stream. Python
// checks the arguments, because it has the error types. The operators repeat only the checks of
// arguments that could corrupt memory.
#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>

#include "binding/masks.h"
#include "binding/tensors.h"
#include "host/limits.h"

using namespace flash_dist;
using namespace flash_dist::binding;

namespace {

using Gradients = std::tuple<Tensor, Tensor, Tensor>;  // dq, dk, dv
using OutLseMax = std::tuple<Tensor, Tensor, Tensor>;  // out, lse, max_logit

// Common arguments of forward and backward.
struct Arguments {
  const Tensor &q, &k, &v;
  Ints mask;
  const MaybeTensor &mask_data, &cu_seqlens_q, &cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  double softmax_scale;
  bool ieee;
  Scores scores = {};
  bool match_kvcache = false;
  Dropout dropout = {};
};

// q, k and v in layouts that the kernels can read.
struct Inputs {
  Sizes sizes;
  Tensor q, k, v;
};

// Results of the forward and their gradients.
struct Outputs {
  Tensor dout, out, lse;
  MaybeTensor dlse;
};

// Reads the numbers of heads and columns. q may be [..., num_heads_kv, group, head_dim] instead of
// [..., num_heads_q, head_dim].
void read_heads(Sizes& s, const Tensor& q, const Tensor& k, const Tensor& v) {
  const int head = s.packed ? 1 : 2;
  STD_TORCH_CHECK(q.dim() == head + 2 || q.dim() == head + 3, "q must have ", head + 2, " or ",
                  head + 3, " dimensions, got ", q.dim());
  STD_TORCH_CHECK(k.dim() == head + 2 && v.dim() == head + 2, "k and v must have ", head + 2,
                  " dimensions, got ", k.dim(), " and ", v.dim());
  if (q.dim() == head + 2) {
    set_heads(s, q.size(head), k.size(head), "k");
  } else {
    s.num_heads_kv = to_int(k.size(head), "num_heads_kv");
    s.group = to_int(q.size(head + 1), "heads per kv head");
    STD_TORCH_CHECK(q.size(head) == s.num_heads_kv, "dimension ", head,
                    " of q must be num_heads_kv of k, ", s.num_heads_kv, ", got ", q.size(head));
  }
  s.head_dim = to_int(q.size(q.dim() - 1), "head_dim");
  s.head_dim_v = to_int(v.size(head + 1), "head_dim_v");
}

Sizes read_sizes(const Arguments& a) {
  Sizes s{};
  s.packed = a.cu_seqlens_q.has_value();
  read_heads(s, a.q, a.k, a.v);
  if (s.packed) {
    s.batch = to_int(a.cu_seqlens_q->numel() - 1, "batch");
    s.total_q = to_int(a.q.size(0), "total_q");
    s.total_k = to_int(a.k.size(0), "total_k");
    s.seqlen_q = std::min(to_int(a.max_seqlen_q, "max_seqlen_q"), s.total_q);
    s.seqlen_k = std::min(to_int(a.max_seqlen_k, "max_seqlen_k"), s.total_k);
  } else {
    s.batch = to_int(a.q.size(0), "batch");
    s.seqlen_q = to_int(a.q.size(1), "seqlen_q");
    s.seqlen_k = to_int(a.k.size(1), "seqlen_k");
  }
  const std::string problem =
      find_size_problem({s.batch, s.seqlen_q, s.seqlen_k, s.num_heads_q(), s.total_q, s.total_k});
  STD_TORCH_CHECK(problem.empty(), problem);
  return s;
}

Inputs read_inputs(const Arguments& a) {
  const Sizes s = read_sizes(a);
  check_shape(a.q, "q", a.q, a.q, s.packed, s.head_dim);
  check_shape(a.k, "k", a.q, a.k, s.packed, s.head_dim);
  check_shape(a.v, "v", a.q, a.k, s.packed, s.head_dim_v);
  return {s, make_readable(a.q, s.packed), make_readable(a.k, s.packed),
          make_readable(a.v, s.packed)};
}

Outputs read_outputs(const Outputs& o, const Tensor& q, const Sizes& s) {
  check_shape(o.dout, "dout", q, q, s.packed, s.head_dim_v);
  check_shape(o.out, "out", q, q, s.packed, s.head_dim_v);
  Outputs made{make_readable(o.dout, s.packed), make_readable(o.out, s.packed),
               read_rows(o.lse, "lse", q, s), std::nullopt};
  if (o.dlse) made.dlse = read_rows(*o.dlse, "dlse", q, s);
  return made;
}

Packing read_packing(const Arguments& a, const Sizes& s) {
  check_together(s.packed, "cu_seqlens_q", a.cu_seqlens_k.has_value(), "cu_seqlens_k");
  if (!s.packed) return {};
  const auto read = [&](const MaybeTensor& t, const char* name) {
    return read_int32(*t, name, a.q, s.batch + int64_t{1}, "[batch + 1], ");
  };
  return {read(a.cu_seqlens_q, "cu_seqlens_q"), read(a.cu_seqlens_k, "cu_seqlens_k")};
}

// Fills in the fields that FwdParams and BwdParams share.
template <class Params>
Params make_params(const Arguments& a, const Inputs& in) {
  const Sizes& s = in.sizes;
  Params p{};
  set_sizes(p, s);
  p.seqlen_k = s.seqlen_k;
  p.total_k = s.total_k;
  p.q = read_view(in.q, s.packed, s.group);
  p.k = read_view(in.k, s.packed);
  p.v = read_view(in.v, s.packed);
  p.packing = read_packing(a, s);
  p.mask = read_mask(a.mask, a.mask_data, in.q, s);
  p.softmax_scale = static_cast<float>(a.softmax_scale);
  p.scores = read_scores(a.scores, in.q, s);
  p.bias = read_bias(a.scores, in.q, s);
  return p;
}

// Runs the forward. max_logit: receives the largest score of each head; may be null.
OutLse run_fwd(const Arguments& a, MaybeTensor* max_logit = nullptr) {
  const Inputs in = read_inputs(a);
  const Sizes& s = in.sizes;
  auto p = make_params<FwdParams>(a, in);
  p.sinks = read_sinks(a.scores, in.q, s);
  const DropoutParams dropout = read_dropout(a.dropout, in.q);
  const DeviceGuard guard(in.q.get_device_index());
  const Call call = make_call(in.q, a.ieee);
  Tensor out = allocate_like(in.q, s.head_dim_v);
  Tensor lse = allocate_rows(s, call.device);
  if (max_logit != nullptr) {
    *max_logit = allocate({int64_t{s.num_heads_q()}}, aoti_torch_dtype_float32(), call.device);
    fill(**max_logit, -std::numeric_limits<double>::infinity());
  }
  if (s.empty()) {
    fill(out, 0.0);
    fill_without_keys(lse, a.scores.sinks, s.packed);
    return {out, lse};
  }
  p.out = read_view(out, s.packed, s.group);
  p.lse = pointer<float>(lse);
  Workspace workspace;
  if (max_logit != nullptr) {
    check_status(flash_dist_fwd_max_logit(&call, &p, pointer<float>(**max_logit),
                                          &Workspace::allocate, &workspace));
    return {out, lse};
  }
  if (dropout.rng_state != nullptr) {
    const FwdDropoutParams all{p, dropout};
    check_status(flash_dist_fwd_dropout(&call, &all, &Workspace::allocate, &workspace));
    return {out, lse};
  }
  const auto forward = a.match_kvcache ? flash_dist_fwd_as_cache : flash_dist_fwd;
  check_status(forward(&call, &p, &Workspace::allocate, &workspace));
  return {out, lse};
}

DeltaParams make_delta_params(const Outputs& o, const Arguments& a, const Inputs& in,
                              const Tensor* dsinks) {
  const Sizes& s = in.sizes;
  DeltaParams p{};
  p.out = read_view(o.out, s.packed, s.group);
  p.dout = read_view(o.dout, s.packed, s.group);
  p.lse = pointer<const float>(o.lse);
  p.dlse = o.dlse ? pointer<const float>(*o.dlse) : nullptr;
  p.sinks = read_sinks(a.scores, in.q, s);
  if (dsinks != nullptr) {
    p.dsinks = pointer<float>(*dsinks);
    if (s.packed) fill(*dsinks, 0.0);  // rows outside every document stay 0
  }
  return p;
}

// dsinks: null without sinks. It has the shape of lse and receives each query's contribution to the
// gradient of its head's sink.
Gradients run_bwd(const Arguments& a, const Outputs& saved, BwdOptions options,
                  const MaybeTensor& mask_slots, const Tensor* dsinks = nullptr) {
  const Inputs in = read_inputs(a);
  const Sizes& s = in.sizes;
  const Outputs o = read_outputs(saved, in.q, s);
  auto p = make_params<BwdParams>(a, in);
  options.key_slots = read_key_slots(mask_slots, p.mask);
  options.dropout = read_dropout(a.dropout, in.q);
  const DeviceGuard guard(in.q.get_device_index());
  const Call call = make_call(in.q, a.ieee);
  Tensor dq = allocate_like(in.q), dk = allocate_like(in.k), dv = allocate_like(in.v);
  if (s.empty()) {
    for (const Tensor& gradient : {dq, dk, dv}) fill(gradient, 0.0);
    if (dsinks != nullptr) o.dlse ? copy_into(*dsinks, *o.dlse) : fill(*dsinks, 0.0);
    return {dq, dk, dv};
  }
  const DeltaParams delta = make_delta_params(o, a, in, dsinks);
  p.dout = delta.dout;
  p.dq = read_view(dq, s.packed, s.group);
  p.dk = read_view(dk, s.packed);
  p.dv = read_view(dv, s.packed);
  Workspace workspace;
  check_status(flash_dist_bwd(&call, &delta, &p, &options, &Workspace::allocate, &workspace));
  return {dq, dk, dv};
}

Tensor run_bias_gradient(const Arguments& a, const Outputs& saved, int64_t splits) {
  const Inputs in = read_inputs(a);
  const Sizes& s = in.sizes;
  const Outputs o = read_outputs(saved, in.q, s);
  const Tensor& bias = *a.scores.bias;
  BiasGradientCall all{};
  all.dropout = read_dropout(a.dropout, in.q);
  BwdParams& p = all.p = make_params<BwdParams>(a, in);
  const DeltaParams delta = make_delta_params(o, a, in, nullptr);
  p.dout = delta.dout;
  all.batches = to_int(bias.size(0), "batch");
  all.heads = to_int(bias.size(1), "num_heads_q");
  all.splits = to_int(splits, "splits");
  all.sums_queries = bias.size(2) == 1 && s.seqlen_q > 1;
  all.sums_keys = bias.size(3) == 1 && s.seqlen_k > 1;
  const auto lines = [](bool sums, int64_t length) {
    return sums ? (length + BIAS_TILE - 1) / BIAS_TILE : length;
  };
  const DeviceGuard guard(in.q.get_device_index());
  const Call call = make_call(in.q, a.ieee);
  bool rounds = false;
  if (!s.empty()) {
    const int answer = flash_dist_rounds_bias_gradient(&call, &all);
    check_status(answer);
    rounds = answer == 1;
  }
  const Tensor parts =
      allocate({splits, bias.size(0), bias.size(1), lines(all.sums_queries, s.seqlen_q),
                lines(all.sums_keys, s.seqlen_k)},
               rounds ? torch_dtype(in.q) : aoti_torch_dtype_float32(), call.device);
  if (s.empty()) {
    fill(parts, 0.0);
    return parts;
  }
  if (rounds) {
    all.rounded = pointer<void>(parts);
  } else {
    all.parts = pointer<float>(parts);
  }
  Workspace workspace;
  check_status(flash_dist_bias_gradient(&call, &delta, &all, &Workspace::allocate, &workspace));
  return parts;
}

// Refuses calls for which the kernels would ignore the bias or the dropout.
void check_options(const Scores& scores, bool match_kvcache, const Dropout& dropout) {
  STD_TORCH_CHECK(!scores.bias || (scores.softcap == 0.0 && !match_kvcache),
                  "bias must be None with softcap or match_kvcache, got a tensor");
  STD_TORCH_CHECK(dropout.p == 0.0 || (scores.softcap == 0.0 && !match_kvcache),
                  "dropout_p must be 0 with softcap or match_kvcache, got ", dropout.p);
}

// --- Operators ----------------------------------------------------------------------------------

OutLse attention(const Tensor& q, const Tensor& k, const Tensor& v, const MaybeTensor& mask_data,
                 const std::vector<int64_t>& mask, const MaybeTensor& cu_seqlens_q,
                 const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                 double softmax_scale, bool ieee, double softcap, const MaybeTensor& alibi_slopes,
                 const MaybeTensor& sinks, bool match_kvcache, const MaybeTensor& bias,
                 double dropout_p, const MaybeTensor& rng_state) {
  const Scores scores{softcap, alibi_slopes, sinks, bias};
  const Dropout dropout{dropout_p, rng_state};
  check_options(scores, match_kvcache, dropout);
  return run_fwd({q, k, v, mask, mask_data, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                  softmax_scale, ieee, scores, match_kvcache, dropout});
}

OutLseMax attention_max_logit(const Tensor& q, const Tensor& k, const Tensor& v,
                              const MaybeTensor& mask_data, const std::vector<int64_t>& mask,
                              const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                              int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                              bool ieee, double softcap, const MaybeTensor& alibi_slopes,
                              const MaybeTensor& sinks, const MaybeTensor& bias) {
  const Scores scores{softcap, alibi_slopes, sinks, bias};
  check_options(scores, false, {});
  MaybeTensor max_logit;
  const auto [out, lse] = run_fwd({q, k, v, mask, mask_data, cu_seqlens_q, cu_seqlens_k,
                                   max_seqlen_q, max_seqlen_k, softmax_scale, ieee, scores},
                                  &max_logit);
  return {out, lse, *max_logit};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const MaybeTensor& dlse, const MaybeTensor& mask_data,
    const MaybeTensor& mask_slots, const std::vector<int64_t>& mask,
    const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q,
    int64_t max_seqlen_k, double softmax_scale, int64_t budget, bool batch_invariant, bool ieee,
    double softcap, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
    const MaybeTensor& bias, double dropout_p, const MaybeTensor& rng_state) {
  const std::vector<int64_t> none{0};
  const Tensor dsinks =
      allocate(sinks ? lse.sizes().vec() : none, aoti_torch_dtype_float32(), q.get_device_index());
  const Scores scores{softcap, alibi_slopes, sinks, bias};
  const Dropout dropout{dropout_p, rng_state};
  check_options(scores, false, dropout);
  const auto [dq, dk, dv] =
      run_bwd({q, k, v, mask, mask_data, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
               softmax_scale, ieee, scores, false, dropout},
              {dout, out, lse, dlse}, {budget, batch_invariant, nullptr}, mask_slots,
              sinks ? &dsinks : nullptr);
  return {dq, dk, dv, dsinks};
}

Tensor attention_bias_parts(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& out, const Tensor& lse, const MaybeTensor& dlse,
                            const MaybeTensor& mask_data, const std::vector<int64_t>& mask,
                            double softmax_scale, bool ieee, const MaybeTensor& alibi_slopes,
                            const Tensor& bias, int64_t splits, double dropout_p,
                            const MaybeTensor& rng_state, const MaybeTensor& cu_seqlens_q,
                            const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q,
                            int64_t max_seqlen_k) {
  const Scores scores{0.0, alibi_slopes, std::nullopt, bias};
  const Dropout dropout{dropout_p, rng_state};
  return run_bias_gradient({q, k, v, mask, mask_data, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                            max_seqlen_k, softmax_scale, ieee, scores, false, dropout},
                           {dout, out, lse, dlse}, splits);
}

OutLse attention_no_grad(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask,
                         const MaybeTensor& mask_data, double softmax_scale, bool ieee,
                         const MaybeTensor& cu_seqlens_q, const MaybeTensor& cu_seqlens_k,
                         int64_t max_seqlen_q, int64_t max_seqlen_k) {
  return run_fwd({q, k, v, read_integers(mask), mask_data, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                  max_seqlen_k, softmax_scale, ieee});
}

Gradients attention_backward_no_grad(const Tensor& dout, const Tensor& q, const Tensor& k,
                                     const Tensor& v, const Tensor& out, const Tensor& lse,
                                     const MaybeTensor& dlse, const Tensor& mask,
                                     const MaybeTensor& mask_data, const MaybeTensor& mask_slots,
                                     double softmax_scale, int64_t budget, bool batch_invariant,
                                     bool ieee, const MaybeTensor& cu_seqlens_q,
                                     const MaybeTensor& cu_seqlens_k, int64_t max_seqlen_q,
                                     int64_t max_seqlen_k) {
  return run_bwd({q, k, v, read_integers(mask), mask_data, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                  max_seqlen_k, softmax_scale, ieee},
                 {dout, out, lse, dlse}, {budget, batch_invariant, nullptr}, mask_slots);
}

}  // namespace

STABLE_TORCH_LIBRARY(flash_dist, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? mask_data, int[] mask, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float "
      "softmax_scale, bool ieee=False, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? "
      "sinks=None, bool match_kvcache=False, Tensor? bias=None, float dropout_p=0.0, Tensor? "
      "rng_state=None) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_max_logit(Tensor q, Tensor k, Tensor v, Tensor? mask_data, int[] mask, Tensor? "
      "cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float "
      "softmax_scale, bool ieee=False, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? "
      "sinks=None, Tensor? bias=None) -> (Tensor out, Tensor lse, Tensor max_logit)");
  // Without sinks, dsinks is empty.
  m.def(
      "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? dlse, Tensor? mask_data, Tensor? mask_slots, int[] mask, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, int "
      "budget, bool batch_invariant, bool ieee=False, float softcap=0.0, Tensor? "
      "alibi_slopes=None, Tensor? sinks=None, Tensor? bias=None, float dropout_p=0.0, Tensor? "
      "rng_state=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  // Returns partial sums [splits, batch, heads, queries, keys] in fp32, or the gradient itself in
  // the dtype of the bias. The caller adds partial sums over splits, and over a broadcast query or
  // key axis, which has one sum per tile of 64.
  m.def(
      "attention_bias_parts(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor? dlse, Tensor? mask_data, int[] mask, float softmax_scale, bool ieee, Tensor? "
      "alibi_slopes, Tensor bias, int splits, float dropout_p=0.0, Tensor? rng_state=None, Tensor? "
      "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt "
      "max_seqlen_k=0) -> Tensor");
  // Operators without an autograd formula, for eager calls without score modification. The mask's
  // integers are in one CPU tensor, because passing an int[] takes torch longer.
  m.def(
      "attention_no_grad(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor? mask_data, float "
      "softmax_scale, bool ieee=False, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int "
      "max_seqlen_q=0, int max_seqlen_k=0) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_backward_no_grad(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor "
      "lse, Tensor? dlse, Tensor mask, Tensor? mask_data, Tensor? mask_slots, float "
      "softmax_scale, int budget, bool batch_invariant, bool ieee=False, Tensor? "
      "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, int max_seqlen_q=0, int max_seqlen_k=0) -> "
      "(Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dist, CUDA, m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_max_logit", TORCH_BOX(&attention_max_logit));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("attention_bias_parts", TORCH_BOX(&attention_bias_parts));
  m.impl("attention_no_grad", TORCH_BOX(&attention_no_grad));
  m.impl("attention_backward_no_grad", TORCH_BOX(&attention_backward_no_grad));
}

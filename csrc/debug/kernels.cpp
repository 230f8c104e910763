#include "kernels.h"

namespace flash_dist::debug {

namespace {

Dtype dtype_of(const std::string& name) {
  if (name == "fp32") return Dtype::FP32;
  if (name == "ieee32") return Dtype::IEEE32;
  return name == "fp16" ? Dtype::FP16 : Dtype::BF16;
}

void check(int status) {
  if (status < 0) throw Refused(flash_dist_last_error());
}

}  // namespace

Kernels::Kernels(const Options& options, const Inputs& inputs)
    : options_(options), inputs_(inputs) {
  call_.device = options.device;
  call_.stream = nullptr;  // torch's default stream
  call_.dtype = static_cast<int>(dtype_of(options.dtype));
  mask_ = mask_params();
}

MaskParams Kernels::mask_params() {
  const Mask& mask = options_.mask;
  MaskParams p{};
  p.kind = MaskKind::BAND;
  p.left = mask.left < 0 ? UNBOUNDED : mask.left;
  p.right = mask.right < 0 ? UNBOUNDED : mask.right;
  p.bottom_right = mask.bottom_right;
  if (mask.form == Mask::Form::BAND) return p;

  arrays_ = row_arrays(mask, options_.seqlen_q, options_.seqlen_k);
  const auto upload = [&](std::vector<int>& array) {
    const int64_t count = static_cast<int64_t>(array.size());
    on_gpu_.push_back(at::from_blob(array.data(), {count}, at::kInt).to(inputs_.q.device()));
    return on_gpu_.back().data_ptr();
  };
  p.kind = MaskKind::ROWS;
  p.left = p.right = UNBOUNDED;
  p.query_tiles = static_cast<int>(arrays_.query_ranges.size() / 4);
  p.key_tiles = static_cast<int>(arrays_.key_ranges.size() / 2);
  p.rows = static_cast<const int2*>(upload(arrays_.rows));
  p.query_ranges = static_cast<const int4*>(upload(arrays_.query_ranges));
  p.key_ranges = static_cast<const int2*>(upload(arrays_.key_ranges));
  p.key_slots = static_cast<const int*>(upload(arrays_.key_slots));
  return p;
}

at::Tensor Kernels::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  const at::Tensor t = at::empty(sizes, inputs_.q.options().dtype(dtype));
  if (dirty_) t.view({-1}).view(at::kByte).fill_(0xFF);  // these bytes are NaN in every dtype
  return t;
}

void* Kernels::allocate(void* self, int64_t bytes) {
  auto& kernels = *static_cast<Kernels*>(self);
  try {
    kernels.workspace_ = kernels.empty({bytes}, at::kByte);
  } catch (const std::exception&) {
    return nullptr;
  }
  return kernels.workspace_.data_ptr();
}

// View of [batch, seqlen, num_heads, columns] as [batch, seqlen, num_heads_kv, heads_per_kv,
// columns].
View Kernels::view(const at::Tensor& t, int heads_per_kv) const {
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2) * heads_per_kv, t.stride(2)};
}

template <class Params>
Params Kernels::params() const {
  Params p{};
  p.q = view(inputs_.q, options_.group());
  p.k = view(inputs_.k, 1);
  p.v = view(inputs_.v, 1);
  p.batch = options_.batch;
  p.seqlen_q = options_.seqlen_q;
  p.seqlen_k = options_.seqlen_k;
  p.num_heads_kv = options_.num_heads_kv;
  p.group = options_.group();
  p.head_dim = options_.head_dim;
  p.head_dim_v = options_.head_dim_v;
  p.softmax_scale = static_cast<float>(options_.softmax_scale);
  p.mask = mask_;
  return p;
}

void Kernels::forward(Outputs& outputs) {
  outputs.out = empty(inputs_.dout.sizes(), inputs_.q.scalar_type());
  outputs.lse = empty({options_.batch, options_.num_heads_q, options_.seqlen_q}, at::kFloat);
  auto p = params<FwdParams>();
  p.out = view(outputs.out, options_.group());
  p.lse = outputs.lse.data_ptr<float>();
  check(flash_dist_fwd(&call_, &p, &Kernels::allocate, this));
}

void Kernels::backward(Outputs& outputs) {
  outputs.dq = empty(inputs_.q.sizes(), inputs_.q.scalar_type());
  outputs.dk = empty(inputs_.k.sizes(), inputs_.q.scalar_type());
  outputs.dv = empty(inputs_.v.sizes(), inputs_.q.scalar_type());
  DeltaParams delta{};
  delta.out = view(outputs.out, options_.group());
  delta.dout = view(inputs_.dout, options_.group());
  delta.lse = outputs.lse.data_ptr<float>();
  auto p = params<BwdParams>();
  p.dout = delta.dout;
  p.dq = view(outputs.dq, options_.group());
  p.dk = view(outputs.dk, 1);
  p.dv = view(outputs.dv, 1);
  BwdOptions how{};
  how.budget = options_.budget_mb << 20;
  how.batch_invariant = options_.batch_invariant;
  how.key_slots = mask_.kind == MaskKind::BAND ? nullptr : arrays_.key_slots.data();
  check(flash_dist_bwd(&call_, &delta, &p, &how, &Kernels::allocate, this));
  workspace_ = at::Tensor();
}

std::vector<std::string> last_kernels() {
  std::string json(flash_dist_last_variant_json(nullptr, 0) + 1, '\0');
  flash_dist_last_variant_json(json.data(), static_cast<int64_t>(json.size()));
  std::vector<std::string> symbols;
  const std::string key = "\"symbol\": \"";
  for (size_t i = json.find(key); i != std::string::npos; i = json.find(key, i)) {
    i += key.size();
    symbols.push_back(json.substr(i, json.find('"', i) - i));
  }
  return symbols;
}

}  // namespace flash_dist::debug

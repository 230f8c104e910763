// Checks and reads the tensors of a call: their device, stream and dtype; sizes; views (q, k, v,
// out and their gradients); rows (lse and its gradient); score modification, bias, dropout, sinks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "host/capi.h"
#include "host/scores.h"
#include "native/binding/torch.h"

namespace flash_dist::binding {

using MaybeTensor = std::optional<Tensor>;
using OutLse = std::tuple<Tensor, Tensor>;
using Ints = torch::headeronly::IntHeaderOnlyArrayRef;

// Checks that t has the dtype and device of q, and that the device is a GPU.
inline void check_kind(const Tensor& t, const char* name, const Tensor& q) {
  if (torch_dtype(t) == torch_dtype(q) && is_on_gpu_of(t, q)) return;
  STD_TORCH_CHECK(q.is_cuda(), "q must be on a GPU, got ", show(q));
  STD_TORCH_CHECK(false, name, " must be ", dtype_name(q.scalar_type()), " on ", show_device(q),
                  ", as q, got ", show(t));
}

// Checks a tensor of `count` int32 lengths, offsets or indices, and returns its address. words:
// text before the count in the error message.
inline const int* read_int32(const Tensor& t, const char* name, const Tensor& q, int64_t count,
                             const char* words = "") {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && is_on_gpu_of(t, q) && t.dim() == 1 &&
                      t.is_contiguous() && t.numel() == count,
                  name, " must be contiguous int32 ", words, "[", count,
                  *words == 0 ? "] on " : "], on ", show_device(q), ", got ", show(t));
  return pointer<int>(t);
}

inline Dtype dtype_of(const Tensor& q) {
  const int32_t dtype = torch_dtype(q);
  if (dtype == aoti_torch_dtype_float16()) return Dtype::FP16;
  if (dtype == aoti_torch_dtype_bfloat16()) return Dtype::BF16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float32(),
                  "q must be float16, bfloat16 or float32, got ", dtype_name(q.scalar_type()));
  return Dtype::FP32;
}

// Returns the device, dtype and stream of a call with queries q. ieee: multiply float32 with FFMA
// instead of TF32.
inline Call make_call(const Tensor& q, bool ieee) {
  Call call{};
  call.device = q.get_device_index();
  const Dtype dtype = dtype_of(q);
  call.dtype = static_cast<int>(ieee && dtype == Dtype::FP32 ? Dtype::IEEE32 : dtype);
  call.stream = current_stream(call.device);
  return call;
}

// --- Sizes ------------------------------------------------------------------------------------

// Sizes of a call. Packed tensors have no batch axis; seqlen_q and seqlen_k are then the longest
// lengths.
struct Sizes {
  bool packed;
  int batch, seqlen_q, seqlen_k, num_heads_kv, group, head_dim, head_dim_v;
  int total_q, total_k;  // packed: number of tokens, else 0

  int64_t num_heads_q() const { return int64_t{num_heads_kv} * group; }
  // Returns the number of (query, query head) pairs.
  int64_t rows() const { return num_heads_q() * (packed ? total_q : int64_t{batch} * seqlen_q); }
  // True if there are no queries or no keys: nothing is launched, and the outputs are constants.
  bool empty() const { return batch == 0 || seqlen_q == 0 || seqlen_k == 0; }
};

// Sets the number of heads of q and of k. `name` is the name of k in errors.
inline void set_heads(Sizes& s, int64_t num_heads_q, int64_t num_heads_kv, const char* name) {
  STD_TORCH_CHECK(num_heads_kv > 0 && num_heads_q % num_heads_kv == 0,
                  "num_heads_kv must divide num_heads_q, got ", num_heads_kv, " (", name, ") and ",
                  num_heads_q, " (q)");
  s.num_heads_kv = to_int(num_heads_kv, "num_heads_kv");
  s.group = to_int(num_heads_q / num_heads_kv, "heads per kv head");
}

template <class Params>  // FwdParams, BwdParams, DecodeParams
void set_sizes(Params& p, const Sizes& s) {
  p.batch = s.batch;
  p.seqlen_q = s.seqlen_q;
  p.num_heads_kv = s.num_heads_kv;
  p.group = s.group;
  p.total_q = s.total_q;
  p.head_dim = s.head_dim;
  p.head_dim_v = s.head_dim_v;
}

// --- Views ------------------------------------------------------------------------------------

// Allocates a contiguous tensor with the sizes of t, but `columns` in the last dimension.
inline Tensor allocate_like(const Tensor& t, int64_t columns) {
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes.back() = columns;
  return allocate(sizes, torch_dtype(t), t.get_device_index());
}

// Checks that t has the dtype and GPU of q, the batch of q, `columns` columns, and otherwise the
// shape of `like` (q or k).
inline void check_shape(const Tensor& t, const char* name, const Tensor& q, const Tensor& like,
                        bool packed, int columns) {
  check_kind(t, name, q);
  const auto sizes = like.sizes(), shape = t.sizes();
  int64_t wanted[5];
  std::copy(sizes.begin(), sizes.end(), wanted);
  if (!packed) wanted[0] = q.size(0);
  wanted[sizes.size() - 1] = columns;
  STD_TORCH_CHECK(std::equal(shape.begin(), shape.end(), wanted, wanted + sizes.size()), name,
                  " must have shape ", show_numbers(Ints(wanted, sizes.size())), ", got ",
                  show_shape(t));
  const int64_t step = elements_at_once(t);
  STD_TORCH_CHECK(columns % step == 0, "the last dimension of ", name, " must be a multiple of ",
                  step, ", got ", columns);
}

// True if no two rows of t overlap, except that whole batch entries or heads may share memory.
// Always true for float32. Rows overlap in expanded tensors (the gradient of a sum over queries,
// for example). TMA cannot read such a tensor, so the Hopper kernels refuse it, and the general
// kernels would return other bits than the Hopper kernels return for a copy.
inline bool has_own_rows(const Tensor& t, bool packed) {
  if (dtype_of(t) == Dtype::FP32) return true;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t row = packed ? 0 : 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) {
    const bool repeated = strides[i] == 0 && i != row;  // batch and heads may have stride 0
    if (sizes[i] > 1 && strides[i] < sizes.back() && !repeated) return false;
  }
  return true;
}

// Returns t, or a copy if some kernel cannot read t. Callers cannot avoid the copy: autograd sets
// the layout of gradients (expanded or sliced), and Inductor sets addresses in compiled graphs.
inline Tensor make_readable(const Tensor& t, bool packed) {
  return is_loadable(t) && has_own_rows(t, packed) ? t : copy(t);
}

// Returns the view of a tensor [batch, seqlen, heads, columns]; a packed tensor has no batch axis.
// heads may be the two axes [num_heads_kv, group]. group: query heads per kv head; 1 for k and v.
inline View read_view(const Tensor& t, bool packed, int group = 1) {
  const auto strides = t.strides();
  const int row = packed ? 0 : 1;
  View view{};
  view.data = t.data_ptr();
  view.batch = packed ? 0 : strides[0];
  view.row = strides[row];
  const bool split = t.dim() == row + 4;
  view.head_group = strides[split ? row + 2 : row + 1];
  view.head_kv = split ? strides[row + 1] : view.head_group * group;
  return view;
}

// --- Rows -------------------------------------------------------------------------------------

// Tensors of rows (lse and its gradient) are fp32 [batch, num_heads_q, seqlen_q], packed
// [num_heads_q, total_q].

inline Tensor allocate_rows(const Sizes& s, int device) {
  std::vector<int64_t> sizes{s.num_heads_q(), s.total_q};
  if (!s.packed) sizes = {s.batch, s.num_heads_q(), s.seqlen_q};
  return allocate(sizes, aoti_torch_dtype_float32(), device);
}

// Checks a tensor of rows, and returns it or a contiguous copy.
inline Tensor read_rows(const Tensor& t, const char* name, const Tensor& q, const Sizes& s) {
  STD_TORCH_CHECK(
      t.scalar_type() == ScalarType::Float && is_on_gpu_of(t, q) && t.numel() == s.rows(), name,
      " must be float32 on ", show_device(q), " with ", s.rows(),
      " numbers, one for each query and head, got ", show(t));
  return t.is_contiguous() ? t : copy(t);
}

// Fills lse of a call without keys: each element with the sink of its head, or with -inf if there
// are no sinks.
inline void fill_without_keys(const Tensor& lse, const MaybeTensor& sinks, bool packed) {
  if (!sinks || lse.numel() == 0) return fill(lse, -std::numeric_limits<double>::infinity());
  const int64_t strides[] = {0, 1, 0};
  const int dims = packed ? 2 : 3;
  AtenTensorHandle expanded = nullptr;
  const AOTITorchError status =
      aoti_torch__reinterpret_tensor(sinks->get(), dims, lse.sizes().data(), strides + 3 - dims,
                                     /*begin in sinks*/ 0, &expanded);
  STD_TORCH_CHECK(status == AOTI_TORCH_SUCCESS, "torch could not expand sinks on GPU ",
                  lse.get_device_index());
  copy_into(lse, Tensor(expanded));
}

// --- Scores, bias, dropout, sinks -------------------------------------------------------------

// The score modification of a call, with the types of the operator schemas. {}: none.
struct Scores {
  double softcap = 0.0;
  MaybeTensor alibi_slopes;  // [num_heads_q] or [batch, num_heads_q]
  MaybeTensor sinks;         // [num_heads_q]
  // [1 or batch, 1 or num_heads_q, 1 or seqlen_q, 1 or seqlen_k]. With packed documents the batch
  // axis is 1, and seqlen_q and seqlen_k are the longest lengths.
  MaybeTensor bias;
};

inline const float* read_floats(const Tensor& t, const char* name, const Tensor& q) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && is_on_gpu_of(t, q) && t.is_contiguous(),
                  name, " must be contiguous float32 on ", show_device(q), ", got ", show(t));
  return pointer<float>(t);
}

inline ScoreParams read_scores(const Scores& scores, const Tensor& q, const Sizes& s) {
  ScoreParams p{};
  p.softcap = static_cast<float>(scores.softcap);
  if (!scores.alibi_slopes) return p;
  const Tensor& slopes = *scores.alibi_slopes;
  const int64_t heads = s.num_heads_q();
  const bool shared = slopes.dim() == 1;
  STD_TORCH_CHECK(slopes.numel() == (shared ? heads : heads * s.batch) &&
                      slopes.size(slopes.dim() - 1) == heads,
                  "alibi_slopes must have shape [", heads, "] or [", s.batch, ", ", heads,
                  "], got ", show_shape(slopes));
  p.alibi = read_floats(slopes, "alibi_slopes", q);
  p.alibi_batch = shared ? 0 : static_cast<int>(heads);
  return p;
}

// Checks and reads the bias of a call. Returns {} if the call has none.
inline BiasParams read_bias(const Scores& scores, const Tensor& q, const Sizes& s) {
  BiasParams p{};
  if (!scores.bias) return p;
  const Tensor& bias = *scores.bias;
  const int64_t wanted[] = {s.packed ? 1 : s.batch, s.num_heads_q(), s.seqlen_q, s.seqlen_k};
  bool fits = bias.dim() == 4;
  for (int i = 0; i < 4 && fits; ++i) fits = bias.size(i) == 1 || bias.size(i) == wanted[i];
  STD_TORCH_CHECK(fits, "bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_k], ",
                  show_numbers(Ints(wanted, 4)), ", got ", show_shape(bias));
  p.is_fp32 = bias.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK((p.is_fp32 || torch_dtype(bias) == torch_dtype(q)) && is_on_gpu_of(bias, q),
                  "bias must be float32 or ", dtype_name(q.scalar_type()), " on ", show_device(q),
                  ", as q, got ", show(bias));
  int64_t strides[4];
  for (int i = 0; i < 4; ++i) strides[i] = bias.size(i) == 1 ? 0 : bias.stride(i);
  const auto address = reinterpret_cast<uintptr_t>(bias.data_ptr());
  const bool is_even = (strides[0] | strides[1] | strides[2] | s.seqlen_k) % 2 == 0;
  p.in_pairs = is_even && strides[3] == 1 && address % (p.is_fp32 ? 8 : 4) == 0;
  p.data = bias.data_ptr();
  p.batch = strides[0];
  p.head = strides[1];
  p.row = strides[2];
  p.key = strides[3];
  return p;
}

// The dropout of a call, with the types of the operator schemas.
struct Dropout {
  double p = 0.0;
  MaybeTensor rng_state;  // [2] seed and offset
};

inline DropoutParams read_dropout(const Dropout& dropout, const Tensor& q) {
  check_together(dropout.p != 0.0, "dropout_p", dropout.rng_state.has_value(), "rng_state");
  if (!dropout.rng_state) return {};
  STD_TORCH_CHECK(dropout.p >= 0.0 && dropout.p < 1.0,
                  "dropout_p must be at least 0 and less than 1, got ", dropout.p);
  const Tensor& t = *dropout.rng_state;
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long && is_on_gpu_of(t, q) && t.dim() == 1 &&
                      t.numel() == 2 && t.is_contiguous(),
                  "rng_state must be contiguous int64 with shape [2] on ", show_device(q), ", got ",
                  show(t));
  return make_dropout(dropout.p, pointer<const int64_t>(t));
}

// Checks the sinks of a call, and returns their address; null if the call has none.
inline const float* read_sinks(const Scores& scores, const Tensor& q, const Sizes& s) {
  if (!scores.sinks) return nullptr;
  STD_TORCH_CHECK(scores.sinks->dim() == 1 && scores.sinks->numel() == s.num_heads_q(),
                  "sinks must have shape [", s.num_heads_q(), "], got ", show_shape(*scores.sinks));
  return read_floats(*scores.sinks, "sinks", q);
}

}  // namespace flash_dist::binding

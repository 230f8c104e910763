// The device, stream and dtype of a call of the attention operators, and how errors show a tensor.
#pragma once

#include <cstdint>
#include <string>

#include "host/capi.h"
#include "native/binding/torch.h"

namespace flash_dist::binding {

inline std::string show_device(const Tensor& t) {
  return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "cpu";
}

// "[2, 4]"
template <class Numbers>
std::string show_numbers(const Numbers& numbers) {
  std::string text;
  for (const int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

inline std::string show_shape(const Tensor& t) { return show_numbers(t.sizes()); }

// "float16 [2, 4] on cuda:0, not contiguous"
inline std::string show(const Tensor& t) {
  const std::string place =
      std::string(dtype_name(t.scalar_type())) + " " + show_shape(t) + " on " + show_device(t);
  return t.is_contiguous() ? place : place + ", not contiguous";
}

// That t has the dtype of q and its device, which is a GPU.
inline void check_kind(const Tensor& t, const Tensor& q, const char* name) {
  if (torch_dtype(t) == torch_dtype(q) && is_on_gpu_of(t, q)) return;
  STD_TORCH_CHECK(q.is_cuda(), "q must be on a GPU, got ", show(q));
  STD_TORCH_CHECK(false, name, " must be ", dtype_name(q.scalar_type()), " on ", show_device(q),
                  ", as q, got ", show(t));
}

// That two tensors are both there or both missing.
inline void check_together(bool first, bool second, const char* name, const char* other) {
  STD_TORCH_CHECK(first == second, name, " and ", other, " must be given together, got only ",
                  first ? name : other);
}

inline Dtype dtype_of(const Tensor& q) {
  const int32_t dtype = torch_dtype(q);
  if (dtype == aoti_torch_dtype_float16()) return Dtype::FP16;
  if (dtype == aoti_torch_dtype_bfloat16()) return Dtype::BF16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float32(),
                  "q must be float16, bfloat16 or float32, got ", dtype_name(q.scalar_type()));
  return Dtype::FP32;
}

// ieee: products of float32 are FFMA.
inline Call make_call(const Tensor& q, bool ieee) {
  Call call{};
  call.device = q.get_device_index();
  const Dtype dtype = dtype_of(q);
  call.dtype = static_cast<int>(ieee && dtype == Dtype::FP32 ? Dtype::IEEE32 : dtype);
  call.stream = current_stream(call.device);
  return call;
}

}  // namespace flash_dist::binding

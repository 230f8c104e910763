// The device, stream and dtype of a call of the attention operators.
#pragma once

#include <cstdint>

#include "host/capi.h"
#include "native/binding/torch.h"

namespace flash_dist::binding {

inline Dtype dtype_of(const Tensor& q) {
  const int32_t dtype = torch_dtype(q);
  if (dtype == aoti_torch_dtype_float16()) return Dtype::FP16;
  if (dtype == aoti_torch_dtype_bfloat16()) return Dtype::BF16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float32(), "q must be float16, bfloat16 or float32");
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

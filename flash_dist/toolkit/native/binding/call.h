// The context of a kernel call, read from a tensor: its GPU, current stream and dtype.
#pragma once

#include <string>
#include <vector>

#include "native/binding/torch.h"
#include "native/call.h"
#include "roles.h"

namespace KERNEL_NAMESPACE::binding {

struct NamedDtype {
  const char* word;  // such as "bf16"
  ScalarType type;
};
constexpr NamedDtype NAMED_DTYPES[] = {
    {"fp64", ScalarType::Double},
    {"fp32", ScalarType::Float},
    {"fp16", ScalarType::Half},
    {"bf16", ScalarType::BFloat16},
    {"fp8_e4m3", ScalarType::Float8_e4m3fn},
    {"fp8_e5m2", ScalarType::Float8_e5m2},
    {"int8", ScalarType::Char},
    {"uint8", ScalarType::Byte},
};

// Returns the index of t's dtype among the words of a dtype axis. Throws if no word names this
// dtype. The words must be those of NAMED_DTYPES.
inline int dtype_word(const Tensor& t, const char* name, int axis) {
  std::vector<std::string> allowed;
  for (int number = 0; number < word_count(axis); ++number) {
    for (const NamedDtype& one : NAMED_DTYPES) {
      if (std::string(one.word) != word_name(axis, number)) continue;
      if (t.scalar_type() == one.type) return number;
      allowed.push_back(dtype_name(one.type));
    }
  }
  std::string listed;
  for (size_t i = 0; i < allowed.size(); ++i) {
    listed += (i == 0 ? "" : i + 1 == allowed.size() ? " or " : ", ") + allowed[i];
  }
  STD_TORCH_CHECK(false, name, " must be ", listed, ", got ", dtype_name(t.scalar_type()));
  return -1;
}

// Returns the context of a call on t: the GPU of t, that GPU's current stream, and t's dtype.
inline Call make_call(const Tensor& t, const char* name, int axis) {
  const int device = t.get_device_index();
  return {device, current_stream(device), dtype_word(t, name, axis)};
}

}  // namespace KERNEL_NAMESPACE::binding

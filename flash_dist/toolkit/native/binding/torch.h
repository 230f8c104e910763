// Wrappers of torch's stable ABI for operators: checks, dtypes, the current stream, outputs and
// workspace from torch's allocator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "names.h"
#include "native/report.h"
#include "product.h"

// Weak: a CPU build of torch lacks these symbols, and importing the binding must work with it.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t, void**);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void*);
}

namespace KERNEL_NAMESPACE::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;  // makes a GPU the current one in a scope

inline void check_status(int64_t status) { STD_TORCH_CHECK(status >= 0, KERNEL_C(last_error)()); }

// Returns the number of a tensor's dtype in torch's C interface.
inline int32_t torch_dtype(const Tensor& t) {
  int32_t dtype = 0;
  STD_TORCH_CHECK(aoti_torch_get_dtype(t.get(), &dtype) == AOTI_TORCH_SUCCESS,
                  "torch does not tell the dtype of a tensor");
  return dtype;
}

// Returns the current stream (cudaStream_t) of a GPU.
inline void* current_stream(int device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "this torch was built without CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &stream) == AOTI_TORCH_SUCCESS,
                  "torch has no current stream on GPU ", device);
  return stream;
}

inline cudaStream_t stream_of(const Tensor& t) {
  return static_cast<cudaStream_t>(current_stream(t.get_device_index()));
}

template <class T>
T* pointer(const Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

// --- Checks: each throws an error that names the argument ---------------------------------------

// Returns torch's Python name of a dtype, such as "float16"; for a rare dtype its C++ name.
inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return torch::headeronly::toString(type);
  }
}

inline std::string show_device(const Tensor& t) {
  return t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "cpu";
}

// Returns text such as "[2, 4]".
inline std::string show_numbers(torch::headeronly::IntHeaderOnlyArrayRef numbers) {
  std::string text;
  for (const int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

inline std::string show_shape(const Tensor& t) { return show_numbers(t.sizes()); }

// Returns text such as "float16 [2, 4] on cuda:0, not contiguous".
inline std::string show(const Tensor& t) {
  const std::string place =
      std::string(dtype_name(t.scalar_type())) + " " + show_shape(t) + " on " + show_device(t);
  return t.is_contiguous() ? place : place + ", not contiguous";
}

inline bool is_on_gpu_of(const Tensor& t, const Tensor& like) {
  return t.is_cuda() && t.get_device_index() == like.get_device_index();
}

inline void check_device(const Tensor& t, const char* name, const Tensor& like,
                         const char* like_name) {
  STD_TORCH_CHECK(is_on_gpu_of(t, like), name, " must be on the GPU of ", like_name);
}

inline void check_dtype(const Tensor& t, const char* name, ScalarType dtype) {
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, " must be ", dtype_name(dtype), ", got ",
                  dtype_name(t.scalar_type()));
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

// Checks that t is contiguous and has the dtype and the GPU of `like`.
inline void check_like(const Tensor& t, const char* name, const Tensor& like,
                       const char* like_name) {
  check_device(t, name, like, like_name);
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), name, " must have the dtype of ",
                  like_name, ", ", dtype_name(like.scalar_type()), ", got ",
                  dtype_name(t.scalar_type()));
  check_contiguous(t, name);
}

inline void check_same_sizes(const Tensor& t, const char* name, const Tensor& like,
                             const char* like_name) {
  const auto sizes = t.sizes();
  const auto wanted = like.sizes();
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end()), name,
                  " must have the shape of ", like_name);
}

// Checks that two tensors are both present or both missing.
inline void check_together(bool first, const char* name, bool second, const char* other) {
  STD_TORCH_CHECK(first == second, name, " and ", other, " must be given together, got only ",
                  first ? name : other);
}

// --- Memory -------------------------------------------------------------------------------------

inline Tensor allocate(const std::vector<int64_t>& sizes, int32_t dtype, int device) {
  std::vector<int64_t> strides(sizes.size());
  int64_t count = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = count;
    count *= sizes[i];
  }
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               dtype, aoti_torch_device_type_cuda(), device, &handle);
  STD_TORCH_CHECK(status == AOTI_TORCH_SUCCESS,
                  "CUDA out of memory. " PRODUCT_NAME " could not allocate ", count,
                  " elements on GPU ", device);
  return Tensor(handle);
}

// Allocates an uninitialised contiguous tensor with the sizes, dtype and GPU of t.
inline Tensor allocate_like(const Tensor& t) {
  const auto shape = t.sizes();
  return allocate({shape.begin(), shape.end()}, torch_dtype(t), t.get_device_index());
}

// Copies `from` into `to` on the current stream.
inline void copy_into(const Tensor& to, const Tensor& from) {
  STD_TORCH_CHECK(aoti_torch_copy_(to.get(), from.get(), 0) == AOTI_TORCH_SUCCESS,
                  "torch could not copy a tensor on GPU ", to.get_device_index());
}

// Returns a contiguous copy.
inline Tensor copy(const Tensor& t) {
  Tensor made = allocate_like(t);
  copy_into(made, t);
  return made;
}

constexpr int64_t ALIGNMENT = 16;  // bytes per load of the kernels

inline int64_t elements_at_once(const Tensor& t) {
  return ALIGNMENT / (torch_dtype(t) == aoti_torch_dtype_float32() ? 4 : 2);
}

// True if 16-byte loads can read the rows of t: the elements of a row are contiguous, and every row
// begins at a multiple of 16 bytes.
inline bool is_loadable(const Tensor& t) {
  const int64_t step = elements_at_once(t);
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  bool loadable = strides.back() == 1 || sizes.back() <= 1;
  loadable &= reinterpret_cast<uintptr_t>(t.data_ptr()) % ALIGNMENT == 0;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) loadable &= sizes[i] <= 1 || strides[i] % step == 0;
  return loadable;
}

// Returns t, or a contiguous copy if 16-byte loads cannot read t. Python checks strides, but cannot
// check the addresses and strides that Inductor chooses in a compiled graph.
inline Tensor make_loadable(const Tensor& t) { return is_loadable(t) ? t : copy(t); }

inline void fill(const Tensor& t, double value) {
  STD_TORCH_CHECK(aoti_torch_aten_fill__Scalar(t.get(), value) == AOTI_TORCH_SUCCESS,
                  "torch could not fill a tensor on GPU ", t.get_device_index());
}

// Memory of the current device from torch's caching allocator, reused in stream order. A Workspace
// is not a tensor: in deterministic mode torch would fill every new tensor, which for a large
// workspace takes as long as a kernel.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace() {
    if (data_ != nullptr) aoti_torch_cuda_caching_allocator_raw_delete(data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // Allocates the memory of a Workspace: a function of type Allocate with the Workspace as its
  // context.
  static void* allocate(void* context, int64_t bytes) {
    void*& data = static_cast<Workspace*>(context)->data_;
    const auto size = static_cast<uint64_t>(bytes);
    const AOTITorchError status = aoti_torch_cuda_caching_allocator_raw_alloc(size, &data);
    return status == AOTI_TORCH_SUCCESS ? data : nullptr;
  }

 private:
  void* data_ = nullptr;
};

inline int to_int(int64_t size, const char* name) {
  STD_TORCH_CHECK(0 <= size && size <= INT32_MAX, name, " must be from 0 to ", INT32_MAX, ", got ",
                  size);
  return static_cast<int>(size);
}

}  // namespace KERNEL_NAMESPACE::binding

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "scale.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor scale_cuda(Tensor x, double factor) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "x must be float32");
  STD_TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  const int device = x.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(device, &stream);
  Tensor out = torch::stable::empty_like(x);
  const cudaError_t error =
      scale(static_cast<const float*>(x.data_ptr()), static_cast<float*>(out.data_ptr()), x.numel(),
            static_cast<float>(factor), static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "scale failed: ", cudaGetErrorString(error));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(my_kernels, m) { m.def("scale(Tensor x, float factor) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(my_kernels, CUDA, m) { m.impl("scale", TORCH_BOX(&scale_cuda)); }

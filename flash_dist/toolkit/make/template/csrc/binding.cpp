#include <torch/csrc/stable/library.h>

#include "native/binding/torch.h"
#include "native/check.h"
#include "scale.h"

namespace {

using namespace my_kernels::binding;

Tensor scale_cuda(Tensor x, double factor) {
  check_dtype(x, "x", ScalarType::Float);
  check_contiguous(x, "x");
  const DeviceGuard guard(x.get_device_index());
  Tensor out = allocate_like(x);
  const cudaError_t launched = scale(pointer<const float>(x), pointer<float>(out), x.numel(),
                                     static_cast<float>(factor), stream_of(x));
  my_kernels::check_cuda(launched, "scale");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(my_kernels, m) { m.def("scale(Tensor x, float factor) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(my_kernels, CUDA, m) { m.impl("scale", TORCH_BOX(&scale_cuda)); }

// The torch operators, on the stable ABI. Python checks arguments with friendlier sentences; the
// checks here prevent memory corruption.
#include <cstdint>
#include <tuple>

#include <torch/csrc/stable/library.h>

#include "host/api.h"
#include "native/binding/call.h"
#include "native/check.h"
#include "plain/silu_mul.h"
#include "roles.h"

namespace {

using namespace own_kernels::binding;

// Allocates rstd: fp32, one value for each row.
Tensor allocate_rstd(const Tensor& x) {
  const auto shape = x.sizes();
  return allocate({shape.begin(), shape.end() - 1}, aoti_torch_dtype_float32(),
                  x.get_device_index());
}

// --- RMS norm ---------------------------------------------------------------------------------

struct Sizes {
  int64_t rows;
  int hidden;
};

Sizes read_sizes(const Tensor& x, const Tensor& weight) {
  check_contiguous(x, "x");
  check_like(weight, "weight", x, "x");
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1),
                  "weight must have one element for each column of x");
  const int hidden = to_int(weight.size(0), "hidden");
  STD_TORCH_CHECK(hidden > 0, "hidden must be at least 1, got 0");
  return {x.numel() / hidden, hidden};
}

void check_rstd(const Tensor& rstd, const Tensor& x, int64_t rows) {
  check_device(rstd, "rstd", x, "x");
  check_dtype(rstd, "rstd", ScalarType::Float);
  check_contiguous(rstd, "rstd");
  STD_TORCH_CHECK(rstd.numel() == rows, "rstd must have one number for each row of x");
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Sizes sizes = read_sizes(x, weight);
  const own_kernels::Call call = make_call(x, "x", own_kernels::DTYPE_AXIS);
  const DeviceGuard guard(call.device);
  Tensor out = allocate_like(x), rstd = allocate_rstd(x);
  own_kernels::RmsParams p{};
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.out = out.data_ptr();
  p.rstd = pointer<float>(rstd);
  p.rows = sizes.rows;
  p.hidden = sizes.hidden;
  p.eps = static_cast<float>(eps);
  check_status(own_kernels_rms(&call, &p));
  return {out, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& dout, const Tensor& x, const Tensor& weight,
                                        const Tensor& rstd) {
  const Sizes sizes = read_sizes(x, weight);
  check_like(dout, "dout", x, "x");
  check_same_sizes(dout, "dout", x, "x");
  check_rstd(rstd, x, sizes.rows);
  const own_kernels::Call call = make_call(x, "x", own_kernels::DTYPE_AXIS);
  const DeviceGuard guard(call.device);
  Tensor dx = allocate_like(x), dweight = allocate_like(weight);
  own_kernels::RmsBwdParams p{};
  p.dout = dout.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.rstd = pointer<const float>(rstd);
  p.dx = dx.data_ptr();
  p.rows = sizes.rows;
  p.hidden = sizes.hidden;
  Workspace workspace;
  check_status(own_kernels_rms_bwd(&call, &p, dweight.data_ptr(), Workspace::allocate, &workspace));
  return {dx, dweight};
}

// --- SiLU times another tensor ----------------------------------------------------------------

own_kernels::Element element_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Half:
      return own_kernels::Element::FP16;
    case ScalarType::BFloat16:
      return own_kernels::Element::BF16;
    case ScalarType::Float:
      return own_kernels::Element::FP32;
    default:
      STD_TORCH_CHECK(false, "a must be float16, bfloat16 or float32");
  }
}

Tensor silu_mul(const Tensor& a, const Tensor& b) {
  check_contiguous(a, "a");
  check_like(b, "b", a, "a");
  check_same_sizes(b, "b", a, "a");
  const own_kernels::Element element = element_of(a);
  const DeviceGuard guard(a.get_device_index());
  Tensor out = allocate_like(a);
  own_kernels::check_cuda(own_kernels::silu_mul(a.data_ptr(), b.data_ptr(), out.data_ptr(),
                                                a.numel(), element, stream_of(a)),
                          "silu_mul");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY(own_kernels, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor out, Tensor rstd)");
  m.def(
      "rms_norm_bwd(Tensor dout, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor "
      "dweight)");
  m.def("silu_mul(Tensor a, Tensor b) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(own_kernels, CUDA, m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm_bwd", TORCH_BOX(&rms_norm_bwd));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
}

// The torch operators, on the stable ABI. Python checks arguments with friendlier sentences; here
// is what would corrupt memory.
#include <cstdint>
#include <tuple>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "host/api.h"
#include "native/binding/torch.h"
#include "native/check.h"
#include "plain/silu_mul.h"
#include "roles.h"

namespace {

using namespace own_kernels::binding;
using torch::stable::accelerator::DeviceGuard;

// A contiguous tensor with the dtype and device of `like`.
void check(const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  STD_TORCH_CHECK(t.is_cuda() && t.get_device_index() == like.get_device_index(), name,
                  " must be on the GPU of ", like_name);
  STD_TORCH_CHECK(torch_dtype(t) == torch_dtype(like), name, " must have the dtype of ", like_name);
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

Tensor allocate_like(const Tensor& t) {
  const auto shape = t.sizes();
  return allocate({shape.begin(), shape.end()}, torch_dtype(t), t.get_device_index());
}

// fp32, one number for each row.
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
  check(x, "x", x, "x");
  check(weight, "weight", x, "x");
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1),
                  "weight must have one element for each column of x");
  const int hidden = to_int(weight.size(0), "hidden");
  STD_TORCH_CHECK(hidden > 0, "hidden must be at least 1, got 0");
  return {x.numel() / hidden, hidden};
}

own_kernels::Call make_call(const Tensor& x) {
  const int32_t dtype = torch_dtype(x);
  const bool bf16 = dtype == aoti_torch_dtype_bfloat16();
  STD_TORCH_CHECK(bf16 || dtype == aoti_torch_dtype_float16(), "x must be float16 or bfloat16");
  const int device = x.get_device_index();
  return {device, current_stream(device), bf16 ? own_kernels::DTYPE_BF16 : own_kernels::DTYPE_FP16};
}

void check_rstd(const Tensor& rstd, const Tensor& x, int64_t rows) {
  STD_TORCH_CHECK(torch_dtype(rstd) == aoti_torch_dtype_float32() && rstd.is_cuda() &&
                      rstd.get_device_index() == x.get_device_index() && rstd.is_contiguous() &&
                      rstd.numel() == rows,
                  "rstd must be contiguous float32 on the GPU of x, one number for each row");
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  const Sizes sizes = read_sizes(x, weight);
  const own_kernels::Call call = make_call(x);
  const DeviceGuard guard(call.device);
  Tensor out = allocate_like(x), rstd = allocate_rstd(x);
  own_kernels::RmsParams p{};
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.out = out.data_ptr();
  p.rstd = static_cast<float*>(rstd.data_ptr());
  p.rows = sizes.rows;
  p.hidden = sizes.hidden;
  p.eps = static_cast<float>(eps);
  check_status(own_kernels_rms(&call, &p));
  return {out, rstd};
}

std::tuple<Tensor, Tensor> rms_norm_bwd(const Tensor& dout, const Tensor& x, const Tensor& weight,
                                        const Tensor& rstd) {
  const Sizes sizes = read_sizes(x, weight);
  check(dout, "dout", x, "x");
  STD_TORCH_CHECK(dout.numel() == x.numel(), "dout must have the shape of x");
  check_rstd(rstd, x, sizes.rows);
  const own_kernels::Call call = make_call(x);
  const DeviceGuard guard(call.device);
  Tensor dx = allocate_like(x), dweight = allocate_like(weight);
  own_kernels::RmsBwdParams p{};
  p.dout = dout.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.rstd = static_cast<const float*>(rstd.data_ptr());
  p.dx = dx.data_ptr();
  p.rows = sizes.rows;
  p.hidden = sizes.hidden;
  Workspace workspace;
  check_status(own_kernels_rms_bwd(&call, &p, dweight.data_ptr(), Workspace::allocate, &workspace));
  return {dx, dweight};
}

// --- SiLU times another tensor ----------------------------------------------------------------

own_kernels::Element element_of(const Tensor& t) {
  const int32_t dtype = torch_dtype(t);
  if (dtype == aoti_torch_dtype_float16()) return own_kernels::Element::FP16;
  if (dtype == aoti_torch_dtype_bfloat16()) return own_kernels::Element::BF16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float32(), "a must be float16, bfloat16 or float32");
  return own_kernels::Element::FP32;
}

Tensor silu_mul(const Tensor& a, const Tensor& b) {
  check(a, "a", a, "a");
  check(b, "b", a, "a");
  STD_TORCH_CHECK(a.numel() == b.numel(), "b must have the shape of a");
  const own_kernels::Element element = element_of(a);
  const int device = a.get_device_index();
  const DeviceGuard guard(device);
  Tensor out = allocate_like(a);
  own_kernels::check_cuda(
      own_kernels::silu_mul(a.data_ptr(), b.data_ptr(), out.data_ptr(), a.numel(), element,
                            static_cast<cudaStream_t>(current_stream(device))),
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

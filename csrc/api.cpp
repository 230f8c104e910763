// The torch operators, on the stable ABI: schemas, outputs and workspace from torch's allocator,
// the current stream. Arguments are checked in Python, where the error types are; here only what
// would corrupt memory.
#include <cstdint>
#include <optional>
#include <tuple>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "capi.h"

// Weak: a CPU build of torch has no such symbols, and importing must work there.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void**);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_alloc(uint64_t, void**);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_caching_allocator_raw_delete(void*);
}

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

flash_dist::Call make_call(const Tensor& q) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "this torch was built without CUDA");
  STD_TORCH_CHECK(q.dim() == 4, "q must have 4 dimensions, got ", q.dim());
  STD_TORCH_CHECK(q.scalar_type() == ScalarType::Half || q.scalar_type() == ScalarType::BFloat16,
                  "q must be float16 or bfloat16");
  flash_dist::Call call{};
  call.device = q.get_device_index();
  call.dtype = static_cast<int>(q.scalar_type() == ScalarType::Half ? flash_dist::Dtype::FP16
                                                                    : flash_dist::Dtype::BF16);
  call.head_dim = static_cast<int>(q.size(3));
  STD_TORCH_CHECK(
      aoti_torch_get_current_cuda_stream(call.device, &call.stream) == AOTI_TORCH_SUCCESS,
      "torch has no current stream on GPU ", call.device);
  return call;
}

Tensor allocate(int64_t ndim, const int64_t* sizes, int32_t dtype, int device) {
  int64_t strides[4];
  int64_t count = 1;
  for (int64_t i = ndim - 1; i >= 0; --i) {
    strides[i] = count;
    count *= sizes[i];
  }
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status = aoti_torch_empty_strided(
      ndim, sizes, strides, dtype, aoti_torch_device_type_cuda(), device, &handle);
  STD_TORCH_CHECK(status == AOTI_TORCH_SUCCESS,
                  "CUDA out of memory. flash_dist could not allocate ", count, " elements on GPU ",
                  device);
  return Tensor(handle);
}

// Bytes of the current device from torch's caching allocator, reused in stream order. Not a tensor:
// in deterministic mode torch would fill every new tensor first, which for a large workspace takes
// as long as a kernel.
class Workspace {
 public:
  Workspace(int64_t bytes, int device) {
    const AOTITorchError status =
        aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &data_);
    STD_TORCH_CHECK(
        status == AOTI_TORCH_SUCCESS, "CUDA out of memory. flash_dist could not allocate ", bytes,
        " bytes of workspace on GPU ", device, "; FLASH_DIST_WORKSPACE_MB sets a smaller budget");
  }
  ~Workspace() { aoti_torch_cuda_caching_allocator_raw_delete(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

Tensor allocate_like(const Tensor& t) {
  const auto sizes = t.sizes();
  const bool half = t.scalar_type() == ScalarType::Half;
  return allocate(4, sizes.data(), half ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16(),
                  t.get_device_index());
}

// [batch, seqlen, num_heads, head_dim] as [batch, seqlen, num_heads / group, group, head_dim]
flash_dist::View view(const Tensor& t, int64_t group) {
  const auto strides = t.strides();
  return {t.data_ptr(), strides[0], strides[1], strides[2] * group, strides[2]};
}

void check_same(const Tensor& t, const Tensor& q, const char* name) {
  STD_TORCH_CHECK(t.dim() == 4 && t.scalar_type() == q.scalar_type() && t.is_cuda() &&
                      t.get_device_index() == q.get_device_index() && t.size(0) == q.size(0) &&
                      t.size(3) == q.size(3),
                  name, " must be a 4-D tensor with the dtype, device, batch and head_dim of q");
  STD_TORCH_CHECK(t.stride(3) == 1 || t.size(3) == 1, name,
                  " must be contiguous in its last dimension");
}

void check_keys(const Tensor& q, const Tensor& k, const Tensor& v) {
  check_same(q, q, "q");
  check_same(k, q, "k");
  check_same(v, q, "v");
  STD_TORCH_CHECK(k.size(1) == v.size(1) && k.size(2) == v.size(2),
                  "k and v must have the same shape");
  STD_TORCH_CHECK(k.size(2) > 0 && q.size(2) % k.size(2) == 0,
                  "num_heads_kv must divide num_heads_q");
}

void check_status(int64_t status) { STD_TORCH_CHECK(status >= 0, flash_dist_last_error()); }

std::tuple<Tensor, Tensor> fwd(Tensor q, Tensor k, Tensor v, double softmax_scale, bool causal) {
  check_keys(q, k, v);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const flash_dist::Call call = make_call(q);
  const int64_t group = q.size(2) / k.size(2);
  Tensor out = allocate_like(q);
  const int64_t lse_sizes[3] = {q.size(0), q.size(2), q.size(1)};
  Tensor lse = allocate(3, lse_sizes, aoti_torch_dtype_float32(), call.device);

  flash_dist::FwdParams p{};
  p.q = view(q, group);
  p.k = view(k, 1);
  p.v = view(v, 1);
  p.out = view(out, group);
  p.lse = static_cast<float*>(lse.data_ptr());
  p.batch = static_cast<int>(q.size(0));
  p.seqlen_q = static_cast<int>(q.size(1));
  p.seqlen_k = static_cast<int>(k.size(1));
  p.num_heads_kv = static_cast<int>(k.size(2));
  p.group = static_cast<int>(group);
  p.causal = causal;
  p.softmax_scale = static_cast<float>(softmax_scale);
  check_status(flash_dist_fwd(&call, &p));
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out,
                                       Tensor lse, std::optional<Tensor> dlse, double softmax_scale,
                                       bool causal, int64_t budget) {
  check_keys(q, k, v);
  check_same(dout, q, "dout");
  check_same(out, q, "out");
  STD_TORCH_CHECK(lse.is_contiguous() && lse.numel() == q.size(0) * q.size(1) * q.size(2),
                  "lse must be contiguous with shape [batch, num_heads_q, seqlen_q]");
  STD_TORCH_CHECK(!dlse || (dlse->is_contiguous() && dlse->numel() == lse.numel()),
                  "dlse must be like lse");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
  const flash_dist::Call call = make_call(q);
  const int64_t group = q.size(2) / k.size(2);
  Tensor dq = allocate_like(q);
  Tensor dk = allocate_like(k);
  Tensor dv = allocate_like(v);

  flash_dist::BwdParams p{};
  p.q = view(q, group);
  p.k = view(k, 1);
  p.v = view(v, 1);
  p.dout = view(dout, group);
  p.dq = view(dq, group);
  p.dk = view(dk, 1);
  p.dv = view(dv, 1);
  p.batch = static_cast<int>(q.size(0));
  p.seqlen_q = static_cast<int>(q.size(1));
  p.seqlen_k = static_cast<int>(k.size(1));
  p.num_heads_kv = static_cast<int>(k.size(2));
  p.group = static_cast<int>(group);
  p.causal = causal;
  p.softmax_scale = static_cast<float>(softmax_scale);

  flash_dist::DeltaParams d{};
  d.out = view(out, group);
  d.dout = p.dout;
  d.lse = static_cast<const float*>(lse.data_ptr());
  d.dlse = dlse ? static_cast<const float*>(dlse->data_ptr()) : nullptr;
  d.batch = p.batch;
  d.seqlen_q = p.seqlen_q;
  d.num_heads_kv = p.num_heads_kv;
  d.group = p.group;

  const int64_t bytes = flash_dist_bwd_workspace(&call, &p, budget);
  check_status(bytes);
  const Workspace workspace(bytes, call.device);
  check_status(flash_dist_bwd(&call, &d, &p, budget, workspace.data()));
  return {dq, dk, dv};
}

}  // namespace

STABLE_TORCH_LIBRARY(flash_dist, m) {
  m.def(
      "fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor out, Tensor "
      "lse)");
  m.def(
      "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, float "
      "softmax_scale, "
      "bool causal, int budget) -> (Tensor dq, Tensor dk, Tensor dv)");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dist, CUDA, m) {
  m.impl("fwd", TORCH_BOX(&fwd));
  m.impl("bwd", TORCH_BOX(&bwd));
}

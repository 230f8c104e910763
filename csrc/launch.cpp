// The sequences of launches behind forward and backward.
#include <algorithm>
#include <cstdint>

#include "capi.h"
#include "check.h"
#include "dispatch.h"
#include "plan.h"
#include "status.h"

namespace flash_dist {

namespace {

constexpr int64_t ALIGNMENT = 256;

int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

const char* dtype_name(int dtype) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::FP16:
      return "fp16";
    case Dtype::BF16:
      return "bf16";
    case Dtype::FP32:
      return "fp32";
  }
  fail("dtype must be 0 (fp16), 1 (bf16) or 2 (fp32), got ", dtype);
}

bool is_fp32(const Call& call) { return call.dtype == static_cast<int>(Dtype::FP32); }

int64_t element_bytes(const Call& call) { return is_fp32(call) ? 4 : 2; }

// How many of `groups` groups of blocks run side by side: where all tiles of a group are equally
// long, one; else as many as half of L2 holds of what the blocks of a group share, `bytes`, in
// nearly equal numbers. All of them where a second batch would start the longest tiles late, and
// where so few run that many blocks of each walk through the same data together.
template <class Params>
int heads_together(const Call& call, const Params& p, int64_t groups, int64_t bytes) {
  if (is_even(p.mask, p.packing.cu_seqlens_q != nullptr) || bytes == 0) return 1;
  const DeviceInfo& device = device_info(call.device);
  const int64_t fitting = std::max<int64_t>(device.l2_bytes / 2 / bytes, 1);
  if (groups <= std::max<int64_t>(4 * fitting, device.sm_count / 4)) {
    return static_cast<int>(groups);
  }
  const int64_t batches = (groups + fitting - 1) / fitting;
  return static_cast<int>((groups + batches - 1) / batches);
}

void run_forward(const Call& call, FwdParams p) {
  const DeviceScope scope(call.device);
  p.heads_together = heads_together(call, p, int64_t{p.batch} * p.num_heads_kv * p.group,
                                    element_bytes(call) * p.seqlen_k * (p.head_dim + p.head_dim_v));
  launch(call.device, {"fwd", dtype_name(call.dtype), p.head_dim, p.head_dim_v}, &p,
         static_cast<cudaStream_t>(call.stream));
}

// The workspace, handed out part by part.
class Parts {
 public:
  explicit Parts(void* begin) : next_(static_cast<uint8_t*>(begin)) {}

  template <class T>
  T* take(int64_t bytes) {
    if (bytes == 0) return nullptr;
    void* begin = next_;
    next_ += aligned(bytes);
    return static_cast<T*>(begin);
  }

 private:
  uint8_t* next_;
};

int64_t workspace_bytes(const BwdPlan& plan) {
  return aligned(plan.statistics) + aligned(plan.ds) + aligned(plan.dq_accum) +
         aligned(plan.dk_partial) + aligned(plan.dv_partial);
}

class Backward {
 public:
  Backward(const Call& call, const DeltaParams& delta, const BwdParams& grads,
           const BwdOptions& options)
      : call_(call),
        dtype_(dtype_name(call.dtype)),
        delta_(delta),
        p_(grads),
        dkdv_(require_kernel(call.device, {"bwd_dkdv", dtype_, grads.head_dim, grads.head_dim_v})),
        packed_(grads.packing.cu_seqlens_q != nullptr),
        plan_(make_plan(options)) {}

  int64_t workspace_bytes() const { return flash_dist::workspace_bytes(plan_); }

  void run(void* workspace) {
    place(workspace);
    run_delta();
    const int64_t row_bytes = element_bytes(call_) * (p_.head_dim + p_.head_dim_v);
    for (const BwdChunk& chunk : plan_.chunks) {
      p_.unit_begin = chunk.unit_begin;
      p_.units = chunk.units;
      p_.key_begin = chunk.key_begin;
      p_.key_end = chunk.key_end;
      p_.dq_first = chunk.first_stripe;
      p_.dq_last = chunk.last_stripe;
      p_.heads_together = heads_together(call_, p_, int64_t{p_.units} * plan_.group_split,
                                         row_bytes * p_.seqlen_q * (p_.group / plan_.group_split));
      launch_compiled("bwd_dkdv", &p_);
      p_.heads_together =
          heads_together(call_, p_, int64_t{p_.units} * p_.group, row_bytes * p_.seqlen_k);
      launch_compiled(dq_family(), &p_);
    }
    if (plan_.group_split > 1) {
      reduce(p_.dk_partial, p_.dk, dkdv_.head_dim, p_.head_dim, p_.softmax_scale);
      reduce(p_.dv_partial, p_.dv, dkdv_.head_dim_v, p_.head_dim_v, 1.0f);
    }
  }

 private:
  const char* dq_family() const { return plan_.spill ? "bwd_dq_gemm" : "bwd_dq_recompute"; }

  BwdPlan make_plan(const BwdOptions& options) const {
    BwdShape shape{};
    shape.batch = p_.batch;
    shape.seqlen_q = p_.seqlen_q;
    shape.seqlen_k = p_.seqlen_k;
    shape.num_heads_kv = p_.num_heads_kv;
    shape.group = p_.group;
    shape.total_q = packed_ ? p_.total_q : -1;
    shape.head_dim = dkdv_.head_dim;
    shape.head_dim_v = dkdv_.head_dim_v;
    shape.mask = p_.mask;
    shape.key_slots = options.key_slots;
    BwdKernels kernels{device_info(call_.device).sm_count, dkdv_.entry->block_rows,
                       dkdv_.entry->blocks_per_sm, 0, 0};
    if (!is_fp32(call_) && options.budget > 0 && options.batch_invariant == 0) {
      const KernelEntry& dq =
          *require_kernel(call_.device, {"bwd_dq_gemm", dtype_, dkdv_.head_dim, dkdv_.head_dim_v})
               .entry;
      kernels.dq_rows = dq.block_rows;
      kernels.dq_blocks_per_sm = dq.blocks_per_sm;
    }
    return plan_backward(shape, kernels, options.budget, options.batch_invariant != 0);
  }

  void place(void* workspace) {
    Parts parts(workspace);
    auto* statistics = parts.take<float>(plan_.statistics);
    p_.lse_log2 = delta_.lse_log2 = statistics;
    p_.delta = delta_.delta = statistics + plan_.statistics / 2 / sizeof(float);
    p_.rows_padded = delta_.rows_padded = plan_.rows_padded;
    p_.ds = parts.take<void>(plan_.ds);
    p_.ds_tiles_per_head = plan_.ds_tiles_per_head;
    p_.dq_accum = parts.take<float>(plan_.dq_accum);
    p_.dk_partial = parts.take<float>(plan_.dk_partial);
    p_.dv_partial = parts.take<float>(plan_.dv_partial);
    p_.group_split = plan_.group_split;
  }

  // The other kernels in the size of the dK/dV kernel, since they share the workspace.
  void launch_compiled(const char* family, const void* params) {
    launch(call_.device, {family, dtype_, dkdv_.head_dim, dkdv_.head_dim_v}, params, stream());
  }

  void run_delta() {
    delta_.batch = p_.batch;
    delta_.seqlen_q = p_.seqlen_q;
    delta_.num_heads_kv = p_.num_heads_kv;
    delta_.group = p_.group;
    delta_.total_q = p_.total_q;
    delta_.head_dim_v = p_.head_dim_v;
    delta_.packing = p_.packing;
    launch(call_.device, {"bwd_delta", dtype_, p_.head_dim_v, p_.head_dim_v}, &delta_, stream());
  }

  void reduce(const float* partial, const View& out, int compiled, int columns, float scale) {
    ReduceParams reduce{};
    reduce.partial = partial;
    reduce.out = out;
    reduce.splits = plan_.group_split;
    reduce.batch = p_.batch;
    reduce.seqlen_k = p_.seqlen_k;
    reduce.num_heads_kv = p_.num_heads_kv;
    reduce.columns = columns;
    reduce.scale = scale;
    reduce.packing = p_.packing;
    launch(call_.device, {"bwd_reduce", dtype_, compiled, compiled}, &reduce, stream());
  }

  cudaStream_t stream() const { return static_cast<cudaStream_t>(call_.stream); }

  const Call& call_;
  const char* dtype_;
  DeltaParams delta_;
  BwdParams p_;
  const Variant& dkdv_;
  const bool packed_;
  const BwdPlan plan_;
};

void run_backward(const Call& call, const DeltaParams& delta, const BwdParams& grads,
                  const BwdOptions& options, Allocate allocate, void* context) {
  const DeviceScope scope(call.device);
  Backward backward(call, delta, grads, options);
  const int64_t bytes = backward.workspace_bytes();
  void* workspace = bytes == 0 ? nullptr : allocate(context, bytes);
  if (bytes != 0 && workspace == nullptr) {
    fail("CUDA out of memory. flash_dist could not allocate ", bytes, " bytes of workspace on GPU ",
         call.device, "\n\nhint: FLASH_DIST_WORKSPACE_MB sets a smaller budget");
  }
  backward.run(workspace);
}

}  // namespace

}  // namespace flash_dist

using namespace flash_dist;

int flash_dist_fwd(const Call* call, const FwdParams* params) {
  return guarded([&] {
    run_forward(*call, *params);
    return 0;
  });
}

int flash_dist_bwd(const Call* call, const DeltaParams* delta, const BwdParams* grads,
                   const BwdOptions* options, Allocate allocate, void* context) {
  return guarded([&] {
    run_backward(*call, *delta, *grads, *options, allocate, context);
    return 0;
  });
}

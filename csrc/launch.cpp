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
  }
  fail("dtype must be 0 (fp16) or 1 (bf16), got ", dtype);
}

// How many heads run side by side: under a causal mask as many as a quarter of L2 holds, two
// tensors of bytes_per_head.
int heads_together(int device, bool causal, int64_t seqlen, int head_dim) {
  if (!causal) return 1;
  const int64_t bytes_per_head = 2 * sizeof(uint16_t) * seqlen * head_dim;
  return static_cast<int>(
      std::clamp<int64_t>(device_info(device).l2_bytes / 4 / bytes_per_head, 1, 1024));
}

void run_forward(const Call& call, FwdParams params) {
  const DeviceScope scope(call.device);
  params.heads_together =
      heads_together(call.device, params.causal, params.seqlen_k, call.head_dim);
  launch(call.device, {"fwd", dtype_name(call.dtype), call.head_dim}, &params,
         static_cast<cudaStream_t>(call.stream));
}

BwdPlan plan_for(const Call& call, const BwdParams& p, int64_t budget) {
  const Variant& dkdv =
      require_kernel(call.device, {"bwd_dkdv", dtype_name(call.dtype), call.head_dim});
  const BwdShape shape{p.batch, p.seqlen_q,    p.seqlen_k,   p.num_heads_kv,
                       p.group, call.head_dim, p.causal != 0};
  const BwdDevice device{device_info(call.device).sm_count, dkdv.entry->block_rows,
                         dkdv.entry->blocks_per_sm};
  return plan_backward(shape, device, budget);
}

int64_t workspace_bytes(const BwdPlan& plan) {
  return aligned(plan.statistics) + aligned(plan.ds) + aligned(plan.dq_accum) +
         aligned(plan.partial);
}

void reduce_partials(const Call& call, const BwdParams& p, const float* partial, const View& out,
                     float scale) {
  const ReduceParams reduce{partial,        out,  p.group_split, p.batch, p.seqlen_k,
                            p.num_heads_kv, scale};
  launch(call.device, {"bwd_reduce", dtype_name(call.dtype), call.head_dim}, &reduce,
         static_cast<cudaStream_t>(call.stream));
}

void run_backward(const Call& call, DeltaParams delta, BwdParams p, int64_t budget,
                  uint8_t* workspace) {
  const DeviceScope scope(call.device);
  const BwdPlan plan = plan_for(call, p, budget);
  const char* dtype = dtype_name(call.dtype);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const auto take = [&](int64_t bytes) -> void* {
    if (bytes == 0) return nullptr;
    void* begin = workspace;
    workspace += aligned(bytes);
    return begin;
  };

  auto* statistics = static_cast<float*>(take(plan.statistics));
  delta.rows_padded = p.rows_padded = plan.rows_padded;
  delta.lse_log2 = statistics;
  delta.delta = statistics + plan.statistics / 2 / sizeof(float);
  p.lse_log2 = delta.lse_log2;
  p.delta = delta.delta;
  p.ds = take(plan.ds);
  p.ds_tiles_per_head = plan.ds_tiles_per_head;
  p.dq_accum = static_cast<float*>(take(plan.dq_accum));
  p.dk_partial = static_cast<float*>(take(plan.partial));
  p.dv_partial =
      p.dk_partial == nullptr ? nullptr : p.dk_partial + plan.partial / 2 / sizeof(float);
  p.group_split = plan.group_split;

  const int key_heads_together = heads_together(call.device, p.causal, p.seqlen_q, call.head_dim);
  const int query_heads_together = heads_together(call.device, p.causal, p.seqlen_k, call.head_dim);
  launch(call.device, {"bwd_delta", dtype, call.head_dim}, &delta, stream);
  for (const BwdChunk& chunk : plan.chunks) {
    p.unit_begin = chunk.unit_begin;
    p.units = chunk.units;
    p.key_begin = chunk.key_begin;
    p.key_end = chunk.key_end;
    p.dq_first = chunk.first_stripe;
    p.dq_last = chunk.last_stripe;
    p.heads_together = key_heads_together;
    launch(call.device, {"bwd_dkdv", dtype, call.head_dim}, &p, stream);
    p.heads_together = query_heads_together;
    launch(call.device, {plan.spill ? "bwd_dq_gemm" : "bwd_dq_recompute", dtype, call.head_dim}, &p,
           stream);
  }
  if (plan.group_split > 1) {
    reduce_partials(call, p, p.dk_partial, p.dk, p.softmax_scale);
    reduce_partials(call, p, p.dv_partial, p.dv, 1.0f);
  }
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

int64_t flash_dist_bwd_workspace(const Call* call, const BwdParams* grads, int64_t budget) {
  return guarded([&] { return workspace_bytes(plan_for(*call, *grads, budget)); });
}

int flash_dist_bwd(const Call* call, const DeltaParams* delta, const BwdParams* grads,
                   int64_t budget, void* workspace) {
  return guarded([&] {
    run_backward(*call, *delta, *grads, budget, static_cast<uint8_t*>(workspace));
    return 0;
  });
}

// The C interface of libflash_dist_kernels.so, for the torch binding, ctypes and C++ programs.
// Functions return 0 (or a length) on success and -1 on failure. After a failure,
// flash_dist_last_error() returns this thread's message. A call allocates memory at most once.
#pragma once

#include <cstdint>

#include "core/decode.h"
#include "core/params.h"
#include "native/call.h"
#include "native/report.h"

namespace flash_dist {

// Options of a backward; see plan.h.
struct BwdOptions {
  int64_t budget;       // bytes of workspace; -1: the current FLASH_DIST_WORKSPACE_MB
  int batch_invariant;  // 0 or 1
  // MaskParams::key_slots in host memory; null: unknown, so dS is stored only for bands
  const int* key_slots;
  DropoutParams dropout = {};  // same as in the forward
};

}  // namespace flash_dist

// Computes out and lse. All pointers are memory of call->device. The caller sets views, lse, sizes,
// softmax_scale, packing, mask, sinks, bias, and the fields of scores above "Filled in at the
// call". This function fills in the other fields. allocate may be null: the call then uses no
// workspace, which is slower for large calls.
KERNEL_API int flash_dist_fwd(const flash_dist::Call* call, const flash_dist::FwdParams* params,
                              flash_dist::Allocate allocate, void* context);

// Computes out and lse like flash_dist_fwd, with the same bits, and finds the largest visible score
// of each head. Sinks do not count as scores. max_logit: [num_heads_q], which the caller has set to
// -inf.
KERNEL_API int flash_dist_fwd_max_logit(const flash_dist::Call* call,
                                        const flash_dist::FwdParams* params, float* max_logit,
                                        flash_dist::Allocate allocate, void* context);

// Like flash_dist_fwd, with dropout of P. allocate must not be null.
KERNEL_API int flash_dist_fwd_dropout(const flash_dist::Call* call,
                                      const flash_dist::FwdDropoutParams* params,
                                      flash_dist::Allocate allocate, void* context);

// Like flash_dist_fwd, but the result has the same bits as that of flash_dist_decode for the same
// keys. Only for 16-bit dtypes and band masks. allocate must not be null.
KERNEL_API int flash_dist_fwd_as_cache(const flash_dist::Call* call,
                                       const flash_dist::FwdParams* params,
                                       flash_dist::Allocate allocate, void* context);

// Computes dq, dk and dv. The caller sets in delta: views of out and dout, lse, dlse, sinks,
// dsinks. The caller sets in grads: views, sizes, softmax_scale, packing, mask, bias, and scores as
// for flash_dist_fwd. This function fills in the other fields. allocate must not be null.
KERNEL_API int flash_dist_bwd(const flash_dist::Call* call, const flash_dist::DeltaParams* delta,
                              const flash_dist::BwdParams* grads,
                              const flash_dist::BwdOptions* options, flash_dist::Allocate allocate,
                              void* context);

// Computes partial sums of the gradient of a bias; each element is written by one block. delta: as
// for flash_dist_bwd. The caller sets in gradient: `parts` or `rounded`, batches, heads, splits,
// sums_queries, sums_keys. In gradient.p the caller sets the same fields as in `grads` of
// flash_dist_bwd, without dq, dk and dv.
KERNEL_API int flash_dist_bias_gradient(const flash_dist::Call* call,
                                        const flash_dist::DeltaParams* delta,
                                        const flash_dist::BiasGradientCall* gradient,
                                        flash_dist::Allocate allocate, void* context);

// Returns 1 if the caller may set BiasGradientCall::rounded, else 0.
KERNEL_API int flash_dist_rounds_bias_gradient(
    const flash_dist::Call* call, const flash_dist::BiasGradientDropoutParams* gradient);

// Computes out and lse of queries that attend to a cache with at least one key. budget: bytes of
// workspace; -1: the current FLASH_DIST_WORKSPACE_MB. This function fills in block_rows and all
// later fields.
KERNEL_API int flash_dist_decode(const flash_dist::Call* call,
                                 const flash_dist::DecodeParams* params, int64_t budget,
                                 flash_dist::Allocate allocate, void* context);

// Appends new keys and values to a cache. Applies rotary embeddings to the new keys and to q.
KERNEL_API int flash_dist_append(const flash_dist::Call* call,
                                 const flash_dist::AppendParams* params);

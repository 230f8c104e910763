// The C interface of libflash_dist_kernels.so: what the torch binding, ctypes and C++ programs
// call. Every function returns 0 (or a length) on success and -1 on failure;
// flash_dist_last_error() then has the sentence, per thread. Memory is asked for once at most.
#pragma once

#include <cstdint>

#include "core/decode.h"
#include "core/params.h"
#include "native/call.h"
#include "native/report.h"

namespace flash_dist {

// How a backward may work; see plan.h.
struct BwdOptions {
  int64_t budget;       // bytes; -1: what FLASH_DIST_WORKSPACE_MB says now
  int batch_invariant;  // 0 or 1
  // MaskParams::key_slots in host memory; null: not known, nothing is spilled
  const int* key_slots;
};

}  // namespace flash_dist

// out and lse. All pointers are device memory of call->device. Given are views, lse, sizes,
// softmax_scale, packing, mask, of scores what is not filled in at the call, and sinks; the remaining
// fields are filled in here. allocate null: without memory of its own, which is slower for large calls.
KERNEL_API int flash_dist_fwd(const flash_dist::Call* call, const flash_dist::FwdParams* params,
                              flash_dist::Allocate allocate, void* context);

// Likewise, with the bits that flash_dist_decode gives for the same keys. The mask is a band, the
// elements have 16 bits, and memory may be needed: allocate is not null.
KERNEL_API int flash_dist_fwd_as_cache(const flash_dist::Call* call,
                                       const flash_dist::FwdParams* params,
                                       flash_dist::Allocate allocate, void* context);

// dq, dk and dv. In delta: views of out and dout, lse, dlse, sinks, dsinks. In grads: views, sizes,
// softmax_scale, packing, mask, scores as above. The remaining fields are filled in here. Memory is
// needed, allocate not null.
KERNEL_API int flash_dist_bwd(const flash_dist::Call* call, const flash_dist::DeltaParams* delta,
                              const flash_dist::BwdParams* grads,
                              const flash_dist::BwdOptions* options, flash_dist::Allocate allocate,
                              void* context);

// Parts of the gradient of a bias, a block each. In delta as above. In gradient: `parts`, batches, heads,
// splits, sums_queries and sums_keys, and of p what `grads` has above but dq, dk and dv, and the bias.
KERNEL_API int flash_dist_bias_gradient(const flash_dist::Call* call,
                                        const flash_dist::DeltaParams* delta,
                                        const flash_dist::BiasGradientParams* gradient,
                                        flash_dist::Allocate allocate, void* context);

// out and lse of queries to a cache, of which there is one at least. budget: bytes of workspace, -1:
// what FLASH_DIST_WORKSPACE_MB says now. The fields from block_rows on are filled in here.
KERNEL_API int flash_dist_decode(const flash_dist::Call* call,
                                 const flash_dist::DecodeParams* params, int64_t budget,
                                 flash_dist::Allocate allocate, void* context);

// New keys and values into a cache; rotary embeddings of them and of q.
KERNEL_API int flash_dist_append(const flash_dist::Call* call,
                                 const flash_dist::AppendParams* params);

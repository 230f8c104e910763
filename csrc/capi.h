// The C interface of libflash_dist_kernels.so: what the torch binding, ctypes and C++ programs
// call. Every function returns 0 (or a length) on success and -1 on failure;
// flash_dist_last_error() then has the sentence, per thread.
#pragma once

#include <cstdint>

#include "params.h"

#define FLASH_DIST_API extern "C" __attribute__((visibility("default")))

namespace flash_dist {

enum class Dtype : int { FP16 = 0, BF16 = 1 };

struct Call {
  int device;
  void* stream;  // cudaStream_t
  int dtype;     // Dtype
  int head_dim;
};

}  // namespace flash_dist

FLASH_DIST_API const char* flash_dist_last_error();

// out and lse. All pointers are device memory of call->device.
FLASH_DIST_API int flash_dist_fwd(const flash_dist::Call* call,
                                  const flash_dist::FwdParams* params);

// dq, dk and dv, in two steps: ask for the workspace, then run in it. delta: views, lse, dlse and
// sizes; grads: views, sizes, causal and softmax_scale. The remaining fields are filled in here.
// budget: bytes, see plan.h.
FLASH_DIST_API int64_t flash_dist_bwd_workspace(const flash_dist::Call* call,
                                                const flash_dist::BwdParams* grads, int64_t budget);
FLASH_DIST_API int flash_dist_bwd(const flash_dist::Call* call,
                                  const flash_dist::DeltaParams* delta,
                                  const flash_dist::BwdParams* grads, int64_t budget,
                                  void* workspace);

// Reports as JSON, into buffer when size suffices; all return the length without the final NUL. No
// torch needed; only flash_dist_select_json() needs a GPU.
FLASH_DIST_API int64_t flash_dist_variants_json(char* buffer, int64_t size);
// It loads what it reports: narrow it by family, dtype and head_dim (null or 0: any), or PTX is
// compiled for kernels that nobody asked for.
FLASH_DIST_API int64_t flash_dist_select_json(int device, const char* family, const char* dtype,
                                              int head_dim, char* buffer, int64_t size);
FLASH_DIST_API int64_t flash_dist_last_variant_json(char* buffer, int64_t size);

// The launches of one backward call, for tests of the planner: shape is batch, seqlen_q, seqlen_k,
// num_heads_kv, group, head_dim, causal; device is SM count, key tile, blocks per SM.
FLASH_DIST_API int64_t flash_dist_plan_json(const int32_t* shape, const int32_t* device,
                                            int64_t budget, char* buffer, int64_t size);

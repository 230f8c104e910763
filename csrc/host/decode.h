// Attention to a cache. The forward also uses it for few queries on many keys, and for calls that
// must have the same bits as attention to a cache. Calls with many queries on a cache run on the
// forward kernel.
#pragma once

#include <cstdint>

#include "host/capi.h"

namespace flash_dist {

// True if the call may contain sequences of few queries on many keys, and kernels for them exist.
bool may_have_few_queries(const Call& call, const FwdParams& p);

// Computes only the sequences of few queries on many keys. Returns the workspace, whose first
// `front` bytes are left to the caller; null if it is empty or cannot be allocated. Without
// workspace the kernels are slower, with the same bits.
void* run_few_queries(const Call& call, const FwdParams& p, int64_t front, Allocate allocate,
                      void* context);

// Converts the arguments of a forward to those of attention to a cache. few_alone: compute only
// packed sequences of few queries on many keys.
DecodeParams as_cache(const FwdParams& p, bool few_alone = false);

// Computes a whole forward as attention to a cache. p: the result of as_cache().
void run_as_cache(const Call& call, const DecodeParams& p, Allocate allocate, void* context);

// Computes attention to a cache with the forward kernel, if this kernel exists, is faster for the
// call, and needs at most `budget` bytes of workspace. Returns true if the forward kernel has run.
// The bits are the same as those of the decode kernels.
bool run_fwd_kvcache(const Call& call, FwdParams p, const CacheParams& cache, int64_t budget,
                     Allocate allocate, void* context);

}  // namespace flash_dist

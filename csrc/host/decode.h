// Attention to a cache for the forward: of few queries on many keys, or for the bits. And the forward for
// many queries to a cache.
#pragma once

#include <cstdint>

#include "host/capi.h"

namespace flash_dist {

// Whether sequences of a forward may be few queries on many keys, and there are kernels for these.
bool may_have_few_queries(const Call& call, const FwdParams& p);

// Computes those sequences alone. Returns its memory, of which the first `front` bytes are free.
// Without any it is slower, to the same bits.
void* run_few_queries(const Call& call, const FwdParams& p, int64_t front, Allocate allocate,
                      void* context);

// A forward as attention to a cache; few_alone: only packed sequences of few queries on many keys.
DecodeParams as_cache(const FwdParams& p, bool few_alone = false);

// Computes all of such a forward, whose mask is a band.
void run_as_cache(const Call& call, const DecodeParams& p, Allocate allocate, void* context);

// Computes a forward to the keys of a cache, if there are a kernel for it that is faster than those of
// the cache, and a workspace of `budget` bytes is enough. Returns whether it did. The bits are the same.
bool run_fwd_kvcache(const Call& call, FwdParams p, const CacheParams& cache, int64_t budget,
                     Allocate allocate, void* context);

}  // namespace flash_dist

// Attention to a cache for the forward: of few queries on many keys, or for the bits.
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

// Computes all of a forward whose mask is a band.
void run_as_cache(const Call& call, const FwdParams& p, Allocate allocate, void* context);

}  // namespace flash_dist

// Few queries on many keys: the forward of such sequences runs as attention to a cache
// (core/decode.h), since kernels with a block for each query tile would leave multiprocessors idle.
#pragma once

#include "core/band.h"

namespace flash_dist {

// Up to 16 queries leave most of a tile of 128 empty. 64 fill half of one: on an H200 one sequence of
// them on 16384 keys, 16 heads, has 0.53 of the best peer's speed in units and 0.28 tile by tile; of
// eight such sequences, which fill the GPU, units have 0.41.
constexpr int FEW_QUERIES = 16, MANY_KEYS = 1024;
constexpr int MORE_QUERIES = 64, MORE_KEYS = 16384;

// NOTE: depends on the sequence's own lengths only. If it depended on the number of heads or of
// sequences, or on other lengths, the bits of a sequence would depend on its batch.
FLASH_DIST_HOST_DEVICE inline bool is_few_queries(int seqlen_q, int seqlen_k) {
  return seqlen_q <= (seqlen_k >= MORE_KEYS ? MORE_QUERIES : FEW_QUERIES) && seqlen_k >= MANY_KEYS;
}

}  // namespace flash_dist

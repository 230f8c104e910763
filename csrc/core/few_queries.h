// Few queries on many keys: sequences whose forward is computed as attention to a cache is
// (core/decode.h), since the kernels that give each tile of queries to a block leave multiprocessors
// idle there.
#pragma once

#include "core/band.h"

namespace flash_dist {

constexpr int FEW_QUERIES = 64;
constexpr int MANY_KEYS = 1024;

// NOTE: of a sequence's own lengths and of nothing else. The number of heads or of sequences, or how
// long others are, would make its bits depend on what it is computed with.
FLASH_DIST_HOST_DEVICE inline bool is_few_queries(int seqlen_q, int seqlen_k) {
  return seqlen_q <= FEW_QUERIES && seqlen_k >= MANY_KEYS;
}

}  // namespace flash_dist

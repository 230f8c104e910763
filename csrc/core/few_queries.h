// Few queries on many keys: sequences whose forward is computed as attention to a cache is
// (core/decode.h), since the kernels that give each tile of queries to a block leave multiprocessors
// idle there.
#pragma once

#include "core/band.h"

namespace flash_dist {

// Up to 16 queries leave most of a tile of 128 empty. With more a full GPU is faster tile by tile: on
// an H200 8 sequences of 64 queries on 16384 keys, 16 heads, take 2.4 times as long in units, one
// takes half as long. From so many keys on that is worth more.
constexpr int FEW_QUERIES = 16, MANY_KEYS = 1024;
constexpr int MORE_QUERIES = 64, MORE_KEYS = 16384;

// NOTE: of a sequence's own lengths and of nothing else. The number of heads or of sequences, or how
// long others are, would make its bits depend on what it is computed with.
FLASH_DIST_HOST_DEVICE inline bool is_few_queries(int seqlen_q, int seqlen_k) {
  return seqlen_q <= (seqlen_k >= MORE_KEYS ? MORE_QUERIES : FEW_QUERIES) && seqlen_k >= MANY_KEYS;
}

}  // namespace flash_dist

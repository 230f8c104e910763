// Arguments of a forward that returns the same bits as attention to a cache. It reads keys and
// values from a cache, or from plain or packed tensors, which CacheParams can describe too.
#pragma once

#include "core/decode.h"

namespace flash_dist {

struct FwdKvcacheCall {
  FwdParams params;  // packing describes only the queries
  CacheParams cache;
  unsigned* tickets;  // see FwdCall::tickets
  float4* parked;     // O of each block's query tile, parked_bytes() bytes; null if 0 bytes
};

// From this many value columns on, shared memory has no room for O of a query tile in addition to K
// and V.
constexpr int PARKED_COLUMNS = 256;

// Returns the bytes of global memory in which the blocks store O of their query tile while they
// compute its next group of keys.
inline int64_t parked_bytes(int blocks, int block_rows, int columns) {
  return columns < PARKED_COLUMNS ? 0 : int64_t{blocks} * block_rows * columns * 4;
}

}  // namespace flash_dist

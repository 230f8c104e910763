// Arguments of a forward with the bits of attention to a cache. Plain tensors and packs are a
// cache, too.
#pragma once

#include "core/decode.h"

namespace flash_dist {

struct FwdKvcacheCall {
  FwdParams params;  // packing: of queries alone
  CacheParams cache;
  unsigned* tickets;  // as FwdCall::tickets
  float4* parked;     // parked_bytes(), or null for none
};

// Columns of values from which on O of a tile of queries has no place in shared memory beside K and V.
constexpr int PARKED_COLUMNS = 256;

// Memory in which each block parks O of a tile of so many queries while it computes a group of keys.
inline int64_t parked_bytes(int blocks, int block_rows, int columns) {
  return columns < PARKED_COLUMNS ? 0 : int64_t{blocks} * block_rows * columns * 4;
}

}  // namespace flash_dist

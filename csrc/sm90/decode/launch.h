// Which calls the tiles of the kernel that reads a cache for many rows are for, and their launch.
#pragma once

#include "core/decode_launch.h"
#include "sm90/decode/kernel.cuh"

namespace flash_dist {

// Of at most 64 rows each has its keys to itself: two small blocks read them at once, one computes while
// the other waits. More rows share them.
template <class Config>
const char* refuse_decode_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  if (Config::LARGER == 0) return nullptr;
  return most_rows(p) > Config::BLOCK_ROWS ? "more rows are read for at once by the larger tile"
                                           : nullptr;
}

}  // namespace flash_dist

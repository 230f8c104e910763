// Launches the multi-row decode kernel on Hopper, and decides which calls its tiles serve.
#pragma once

#include "core/decode_work.cuh"
#include "sm90/decode/kernel.cuh"

namespace flash_dist {

// Returns why this tile does not serve a call; null if it does. A tile of 64 rows leaves calls with
// more rows to the larger tile, if there is one. With at most 64 rows, no other block reads the
// same keys: two small blocks per multiprocessor load at once, and one computes while the other
// waits. More rows share the keys in one larger block.
template <class Config>
const char* refuse_decode_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  if (Config::LARGER == 0) return nullptr;
  return most_rows(p) > Config::BLOCK_ROWS ? "more rows are read for at once by the larger tile"
                                           : nullptr;
}

}  // namespace flash_dist

// Which calls the kernel of latent keys for many heads is for, and its launch.
#pragma once

#include "core/decode_launch.h"
#include "sm90/mla/kernel.cuh"

namespace flash_dist {

// Fewer heads are one tile of the other kernel, which is as fast as memory is; their bits are its own. Of
// more, it takes the time of several tiles.
// NOTE: of the heads alone, not of the queries: a prefill in chunks has the bits of the prefill at once.
constexpr int MANY_HEADS = 17;

template <class Config>
const char* refuse_mla_sm90(const void* params) {
  const auto& p = *static_cast<const DecodeParams*>(params);
  return p.group < MANY_HEADS ? "tiles of 64 rows are for at least 17 heads of a group" : nullptr;
}

}  // namespace flash_dist

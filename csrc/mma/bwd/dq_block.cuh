// Which queries a block of the dQ kernels owns.
#pragma once

#include "core/schedule.cuh"
#include "core/tile.cuh"
#include "params.h"

namespace flash_dist {

// The query tile and head of this block; the longest causal tiles of a head come first.
struct DqBlock {
  int row0, head, batch, head_kv,
      member;  // head: unit * group + member, counted from the chunk's first unit

  __device__ __forceinline__ DqBlock(const BwdParams& p, int block_m) {
    const int q_tiles = (p.seqlen_q + block_m - 1) / block_m;
    const BlockPlace place(fresh_block(), q_tiles, p.units * p.group, p.heads_together);
    row0 = (q_tiles - 1 - place.tile) * block_m;
    head = place.group;
    const int unit = p.unit_begin + head / p.group;
    member = head % p.group;
    batch = unit / p.num_heads_kv;
    head_kv = unit - batch * p.num_heads_kv;
  }
};

}  // namespace flash_dist

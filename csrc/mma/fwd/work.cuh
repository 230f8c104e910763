// What one block of the forward kernel computes.
#pragma once

#include "core/mask.cuh"
#include "core/schedule.cuh"
#include "core/sequence.cuh"
#include "core/views.cuh"

namespace flash_dist {

// The query tile, head and batch of this block; the longest causal tiles of a head come first.
struct FwdBlock {
  int row0, batch, head, head_kv, member;

  __device__ __forceinline__ FwdBlock(const FwdParams& p, int block_m) {
    const int q_tiles = (p.seqlen_q + block_m - 1) / block_m;
    const BlockPlace place(fresh_block(), p.order);
    row0 = (q_tiles - 1 - place.tile) * block_m;
    batch = divide(place.group, p.by_num_heads_q);
    head = place.group - batch * p.by_num_heads_q.divisor;
    head_kv = divide(head, p.by_group);
    member = head - head_kv * p.group;
  }
};

// Where a block works, for all its threads.
template <int BLOCK_M, int BLOCK_N>
struct FwdWork {
  const uint16_t *k, *v;  // the sequence's first key
  int row0;               // the block's first query
  MaskPlace place;
  RowSpan keys;  // that exist
  KeyWalk<BLOCK_M, BLOCK_N> walk;

  __device__ __forceinline__ FwdWork(const FwdParams& p, const FwdBlock& block,
                                     const Sequence& sequence)
      : k(head_begin(p.k, block.batch, block.head_kv, 0) + sequence.k0 * p.k.row),
        v(head_begin(p.v, block.batch, block.head_kv, 0) + sequence.k0 * p.v.row),
        row0(block.row0),
        place(p.mask, sequence, block.batch, block.head),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)),
        walk(Mask(p.mask, place), block.row0) {}
};

}  // namespace flash_dist

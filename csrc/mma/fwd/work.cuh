// The work tile of a block of the mma.sync forward kernel.
#pragma once

#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/scores.cuh"
#include "core/views.cuh"

namespace flash_dist {

// The same for all threads of the block.
template <int BLOCK_M, int BLOCK_N>
struct FwdWork {
  const uint16_t *k, *v;  // the sequence's first key
  int row0;               // the block's first query
  MaskPlace place;
  RowSpan keys;  // that exist
  float slope;   // of ALiBi
  KeyBlockIterator<BLOCK_M, BLOCK_N> blocks;

  __device__ __forceinline__ FwdWork(const FwdParams& p, const FwdBlock& block,
                                     const Sequence& sequence)
      : k(head_begin(p.k, block.batch, block.head_kv, 0) + sequence.k0 * p.k.row),
        v(head_begin(p.v, block.batch, block.head_kv, 0) + sequence.k0 * p.v.row),
        row0(block.row0),
        place(p.mask, sequence, block.batch, block.head),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)),
        slope(alibi_slope(p.scores, block.batch, block.head)),
        blocks(Mask(p.mask, place), block.row0) {}
};

}  // namespace flash_dist

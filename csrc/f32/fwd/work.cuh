// The work tile of a block of the fp32 forward kernel.
#pragma once

#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/scores.cuh"
#include "f32/tile.cuh"

namespace flash_dist {

// The same for all threads of the block.
template <int BLOCK_M, int BLOCK_N>
struct F32FwdWork {
  const float *q, *k, *v;  // the block's first query, the sequence's first key
  int row0;                // first query
  int rows;                // queries left from there
  MaskPlace place;
  RowSpan keys;  // that exist
  float slope;   // of ALiBi
  KeyBlockIterator<BLOCK_M, BLOCK_N> blocks;

  __device__ __forceinline__ F32FwdWork(const FwdParams& p, const FwdBlock& block,
                                        const Sequence& sequence)
      : q(float_head_begin(p.q, block.batch, block.head_kv, block.head_in_group) +
          (sequence.q0 + block.row0) * p.q.row),
        k(float_head_begin(p.k, block.batch, block.head_kv, 0) + sequence.k0 * p.k.row),
        v(float_head_begin(p.v, block.batch, block.head_kv, 0) + sequence.k0 * p.v.row),
        row0(block.row0),
        rows(sequence.seqlen_q - block.row0),
        place(p.mask, sequence, block.batch, block.head),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)),
        slope(alibi_slope(p.scores, block.batch, block.head)),
        blocks(Mask(p.mask, place), block.row0) {}
};

}  // namespace flash_dist

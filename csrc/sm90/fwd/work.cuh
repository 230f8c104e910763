// Where a block of the forward kernel for Hopper works.
#pragma once

#include "core/blocks.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

// The same for all threads of the block; in shared memory, as the accumulators need the registers.
struct FwdSm90Work {
  FwdBlock block;
  Sequence sequence;
  MaskPlace place;
  RowSpan keys;  // that exist
  KeyBounds bounds;

  __device__ __forceinline__ FwdSm90Work(const FwdParams& p, const FwdBlock& block_,
                                         const Sequence& sequence_, int block_m, int block_n)
      : block(block_),
        sequence(sequence_),
        place(p.mask, sequence, block.batch, block.head),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)),
        bounds(Mask(p.mask, place), block.row0, block_m, block_n) {}
};

}  // namespace flash_dist

// Where a block of the backward kernels for Hopper works: the same for all its threads, in shared
// memory, as the accumulators need the registers.
#pragma once

#include "core/blocks.cuh"
#include "core/dkdv_work.cuh"
#include "core/ds_walk.cuh"
#include "core/tile.cuh"

namespace flash_dist {

struct DkdvSm90Work : DkdvWork {
  DkdvBlock block;
  Sequence sequence;
  RowSpan keys;  // that exist
  int items;
};

template <class Config>
__device__ __forceinline__ void find_dkdv_work(DkdvSm90Work& work, const BwdParams& p,
                                               const DkdvBlock& block, const Sequence& sequence) {
  const int members = p.group / p.group_split;
  const int head = block.head_kv * p.group;
  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, head + block.split * members));
  find_work<Config>(work, p, block, sequence, members, head, mask);
  work.block = block;
  work.sequence = sequence;
  work.keys = mask.keys_that_exist(block.batch);
  work.items = DkdvCursor<Config>::count(p, work);
}

// A tile of 64 keys in the sum of dQ.
struct DqSm90Item {
  int key0;
  int slot[2];  // of the dS of the block's two query tiles, -1: none
};

template <int BLOCK_M>
struct DqSm90Work {
  DqBlock block;
  Sequence sequence;
  MaskPlace place;
  DsLayout layout;
  DsWalk<BLOCK_M> walk;
  RowSpan keys;  // that exist

  __device__ __forceinline__ DqSm90Work(const BwdParams& p, const DqBlock& block_,
                                        const Sequence& sequence_)
      : block(block_),
        sequence(sequence_),
        place(p.mask, sequence, block.batch, block.head_kv * p.group + block.member),
        layout(ds_layout(p, sequence)),
        walk(p, Mask(p.mask, place), block.row0),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)) {}

  // Number i of the walk.
  __device__ __forceinline__ DqSm90Item item(const BwdParams& p, int i) const {
    const int first = p.key_begin / DS_TILE;
    if (walk.entries != nullptr) {
      const int skipped = p.mask.key_slots[first];
      const int2 slots = walk.slots[i];
      return {walk.entries[i].x * DS_TILE,
              {slots.x < 0 ? -1 : slots.x - skipped, slots.y < 0 ? -1 : slots.y - skipped}};
    }
    const Mask mask(p.mask, place);
    const int slot = slot_base(mask, layout, first, i);
    const auto find = [&](int m) {
      const bool seen = p.mask.kind == MaskKind::BAND
                            ? layout.query_begin(i) <= m && m < layout.query_end(i)
                            : m * DS_TILE < sequence.seqlen_q &&
                                  mask.range(m * DS_TILE, DS_TILE).touches(i * DS_TILE, DS_TILE);
      return seen ? slot + m : -1;
    };
    const int m = block.row0 / DS_TILE;
    return {i * DS_TILE, {find(m), find(m + 1)}};
  }
};

}  // namespace flash_dist

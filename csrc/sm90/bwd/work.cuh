// The work of a block of the backward kernels for Hopper. All threads of the block read it from
// shared memory, because the accumulators need the registers.
#pragma once

#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/dkdv_items.cuh"
#include "core/tile.cuh"
#include "sm90/ring.cuh"

namespace flash_dist {

struct DkdvSm90Work : DkdvWork {
  DkdvBlock block;
  Sequence sequence;
  RowSpan keys;  // the keys that exist
  int items;     // number of pipeline items
};

template <class Config>
__device__ __forceinline__ void find_dkdv_work(DkdvSm90Work& work, const BwdParams& p,
                                               const DkdvBlock& block, const Sequence& sequence) {
  const int heads_per_split = p.group / p.group_split;
  const int head = block.head_kv * p.group;
  const int first = head + block.split * heads_per_split + p.member_begin;
  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, first));
  find_work<Config>(work, p, block, sequence, heads_per_split, head, mask);
  work.block = block;
  work.sequence = sequence;
  work.keys = mask.keys_that_exist(block.batch);
  work.items = DkdvCursor<Config>::count(p, work);
}

// A tile of 64 keys by which the dQ kernel multiplies dS (dq_gemm.cuh).
struct DqSm90Item {
  int key0;
  int slot[2];  // dS slots of the block's two query tiles; -1: no dS
};

template <int BLOCK_M>
struct DqSm90Work {
  DqBlock block;
  Sequence sequence;
  MaskPlace place;
  DsLayout layout;
  DsBlockIterator<BLOCK_M> key_blocks;
  RowSpan keys;  // the keys that exist

  __device__ __forceinline__ DqSm90Work(const BwdParams& p, const DqBlock& block_,
                                        const Sequence& sequence_)
      : block(block_),
        sequence(sequence_),
        place(p.mask, sequence, block.batch, block.head_kv * p.group + block.head_in_group),
        layout(ds_layout(p, sequence)),
        key_blocks(p, Mask(p.mask, place), block.row0),
        keys(Mask(p.mask, place).keys_that_exist(block.batch)) {}

  // Returns item i of the block iterator.
  __device__ __forceinline__ DqSm90Item item(const BwdParams& p, int i) const {
    const int first = p.key_begin / DS_TILE;
    if (key_blocks.entries != nullptr) {
      const int skipped = p.mask.key_slots[first];
      const int2 slots = key_blocks.slots[i];
      return {key_blocks.entries[i].x * DS_TILE,
              {slots.x < 0 ? -1 : slots.x - skipped, slots.y < 0 ? -1 : slots.y - skipped}};
    }
    const Mask mask(p.mask, place);
    const int slot = slot_base(mask, layout, first, i);
    const auto find = [&](int m) {
      const bool visible = p.mask.kind == MaskKind::BAND
                               ? layout.query_begin(i) <= m && m < layout.query_end(i)
                               : m * DS_TILE < sequence.seqlen_q &&
                                     mask.range(m * DS_TILE, DS_TILE).touches(i * DS_TILE, DS_TILE);
      return visible ? slot + m : -1;
    };
    const int m = block.row0 / DS_TILE;
    return {i * DS_TILE, {find(m), find(m + 1)}};
  }
};

}  // namespace flash_dist

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

// Cursor over the items of a block of the fused kernel. With first_keys_first, it visits the query
// tiles from the last to the first, and all heads of a tile before the next tile. A block then
// stays at least one step behind the blocks of earlier keys, which add to dQ before it does. NOTE:
// head by head, it would reach the next head before those blocks, whose keys are visible to more
// queries, and would wait for them.
template <class Config>
struct FusedCursor : DkdvCursor<Config> {
  using Base = DkdvCursor<Config>;
  static_assert(Base::PER_TILE == 1);

  // Starts at item `number`.
  __device__ __forceinline__ FusedCursor(const BwdParams& p, const DkdvWork& w, int number)
      : Base(p, w) {
    if (p.first_keys_first) {
      const int heads = w.group_heads_end - w.group_heads_begin;
      this->head_in_group += number % heads;
      this->i = w.end - 1 - number / heads;
    } else {
      this->skip(p, w, number);
    }
  }
  __device__ __forceinline__ void next(const BwdParams& p, const DkdvWork& w) {
    if (!p.first_keys_first) return Base::next(p, w);
    if (++this->head_in_group < w.group_heads_end) return;
    this->head_in_group = w.group_heads_begin;
    --this->i;
  }
};

// The blocks with keys visible to a query tile add to the tile's dQ in a fixed order, and this is a
// block's place in it. The blocks also begin in this order: from the last keys to the first, or
// from the first to the last.
struct DqOrder {
  int before;  // number of earlier blocks; -1: none of this block's keys is visible to the tile
  bool is_last;

  __device__ __forceinline__ bool exists() const { return before >= 0; }
};

// Returns the place of a block of KEYS keys in the order of query tile m. known: DkdvItem::known.
template <int KEYS>
__device__ __forceinline__ DqOrder find_order(const BwdParams& p, const DkdvWork& w,
                                              const int4& known, int m) {
  const int n = w.key0 / KEYS;
  if (p.mask.kind == MaskKind::TILES) {
    return {known.w / 2, known.w % 2 != 0};
  }
  RowSpan keys;  // keys visible to the tile, rounded to complete tiles if the mask is a band
  if (p.mask.kind == MaskKind::BAND) {
    const DsLayout layout = ds_layout(p, {0, 0, w.seqlen_q, w.seqlen_k});
    const int tiles = (w.seqlen_k + DS_TILE - 1) / DS_TILE;
    keys = {layout.key_begin(m) * DS_TILE, min(layout.key_end(m), tiles) * DS_TILE};
  } else {
    keys = {known.x, known.w};
  }
  const int first = keys.first / KEYS, last = (keys.end - 1) / KEYS;
  if (keys.end <= 0 || n < first || last < n) return {-1, false};
  if (p.first_keys_first) return {n - first, n == last};
  return {last - n, n == first};
}

// Returns whether any key is visible to query tile m. If not, no block computes a part of the
// tile's dQ.
__device__ __forceinline__ bool is_visible(const BwdParams& p, const Mask& mask,
                                           const DsLayout& layout, int m) {
  if (p.mask.kind == MaskKind::TILES) {
    const int* line = p.mask.by_query[0].begin + mask.plane * p.mask.query_tiles + m;
    return line[0] < line[1];
  }
  if (p.mask.kind == MaskKind::BAND) {
    const int tiles = (mask.seqlen_k + DS_TILE - 1) / DS_TILE;
    return layout.key_begin(m) < min(layout.key_end(m), tiles);
  }
  return p.mask.query_ranges[static_cast<int64_t>(mask.plane) * p.mask.query_tiles + m].w > 0;
}

// An item of the fused kernel, for the warpgroups of keys.
struct FusedItem : DkdvItem {
  int code[2];  // mask codes of the query tile, one for each half of the block's keys
};

// An item of the fused kernel, for the threads that compute and store dQ.
struct DqItem {
  int row0;
  int head_in_group;
  int tile;  // index in dq_accum
  DqOrder order;
};

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

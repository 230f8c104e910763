// The work of a block of keys of the dK/dV kernel: the stages of queries in the order of summation,
// and the mask's codes for each stage.
#pragma once

#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/params.h"
#include "core/sequence.cuh"

namespace flash_dist {

// The work of a block of the dK/dV kernel, shared by its threads. Query head 0 is the first of the
// group.
struct DkdvWork {
  const uint16_t *q, *dout;  // first query of query head 0
  int64_t statistics;        // statistics row of that query
  const int4* entries;       // entries of the mask's list; null: a range
  int begin, end;            // of the QueryBlockIterator of head group_heads_begin
  int batch, head;           // head: index of query head 0 among all query heads
  int group_heads_begin, group_heads_end;
  int seqlen_q, seqlen_k;
  int key0;
  int2 query_tiles;  // query tiles [x, y) of the block's query split
  int slot0[2];      // per key tile: slot of query tile 0 of query head 0; lists: see slot()
  int4 tiles[2];     // BAND: the result of band_tiles() for each key tile
};

// A pipeline item: a stage of queries of one query head.
struct DkdvItem {
  int4 known;  // ROWS: the queries' KeyRange; TILES: the list's entry
  int row0;
  int head_in_group;
  int slot[2];  // dS slot for each key tile of the block; -1: not stored
};

// Iterates over the pipeline's items: for each query head, its query tiles in ascending order.
template <class Config>
struct DkdvCursor {
  static constexpr int PER_TILE = MASK_TILE / Config::BLOCK_M;
  int head_in_group, i, end;  // stages [i, end) of this head remain; PER_TILE per query tile
  const int4* entries;

  __device__ __forceinline__ DkdvCursor(const BwdParams& p, const DkdvWork& w)
      : head_in_group(w.group_heads_begin),
        i(w.begin * PER_TILE),
        end(w.end * PER_TILE),
        entries(w.entries) {
    while (i >= end && head_in_group < w.group_heads_end) next_head(p, w);
  }
  __device__ __forceinline__ void next(const BwdParams& p, const DkdvWork& w) {
    ++i;
    while (i >= end && head_in_group < w.group_heads_end) next_head(p, w);
  }
  // Skips `items` items.
  __device__ __forceinline__ void skip(const BwdParams& p, const DkdvWork& w, int items) {
    while (head_in_group < w.group_heads_end) {
      const int here = max(end - i, 0);  // NOTE: for a head without items, i can start past end
      if (items < here) break;
      items -= here;
      next_head(p, w);
    }
    i += items;
  }
  __device__ __forceinline__ int row0() const {
    const int tile = entries == nullptr ? i / PER_TILE : entries[i / PER_TILE].x;
    return tile * MASK_TILE + i % PER_TILE * Config::BLOCK_M;
  }

  __device__ __forceinline__ static Mask mask_of(const BwdParams& p, const DkdvWork& w,
                                                 int head_in_group) {
    const Sequence sequence{0, 0, w.seqlen_q, w.seqlen_k};
    return Mask(p.mask, MaskPlace(p.mask, sequence, w.batch, w.head + head_in_group));
  }
  __device__ __forceinline__ static QueryBlockIterator<Config::BLOCK_N> iterator_of(
      const BwdParams& p, const DkdvWork& w, int head_in_group) {
    const Mask mask = mask_of(p, w, head_in_group);
    return iterator_of(mask, ds_layout(p, {0, 0, w.seqlen_q, w.seqlen_k}), w);
  }
  __device__ __forceinline__ static QueryBlockIterator<Config::BLOCK_N> iterator_of(
      const Mask& mask, const DsLayout& layout, const DkdvWork& w) {
    QueryBlockIterator<Config::BLOCK_N> query_blocks(mask, layout, w.key0);
    if constexpr (Config::SHARES_QUERIES) query_blocks.clip(w.query_tiles);
    return query_blocks;
  }
  // Returns the number of items of the block.
  __device__ __forceinline__ static int count(const BwdParams& p, const DkdvWork& w) {
    const int heads = w.group_heads_end - w.group_heads_begin;
    if (p.mask.head_planes == 0) return max(w.end - w.begin, 0) * PER_TILE * heads;
    int steps = 0;
    for (int head_in_group = w.group_heads_begin; head_in_group < w.group_heads_end;
         ++head_in_group) {
      const QueryBlockIterator<Config::BLOCK_N> query_blocks = iterator_of(p, w, head_in_group);
      steps += max(query_blocks.end - query_blocks.begin, 0);
    }
    return steps * PER_TILE;
  }

  // Returns the dS slot of the item and one of the block's key tiles (half = 0 or 1); -1: not
  // stored. For lists, adds slot0 to the slot in TileList::slots. Called by one thread.
  __device__ __forceinline__ int slot(const BwdParams& p, const DkdvWork& w, int half) const {
    if (p.ds == nullptr) return -1;
    const int head = head_in_group * static_cast<int>(p.ds_tiles_per_head);
    if (entries != nullptr) {
      const int2 slots = p.mask.by_key[Config::BLOCK_N > MASK_TILE].slots[i / PER_TILE];
      const int slot = half == 0 ? slots.x : slots.y;
      return slot < 0 ? -1 : w.slot0[half] + head + slot;
    }
    if (p.mask.head_planes == 0) return w.slot0[half] + head + i / PER_TILE;
    const int first = p.key_begin / DS_TILE;
    const Mask mask = mask_of(p, w, head_in_group);
    const DsLayout layout = ds_layout(p, {0, 0, w.seqlen_q, w.seqlen_k});
    const int n = w.key0 / DS_TILE;
    return w.slot0[half] - slot_base(mask_of(p, w, 0), layout, first, n + half) +
           slot_base(mask, layout, first, n + half) + head + i / PER_TILE;
  }

  // Returns the address of the 16 bytes of the mask's arrays that become DkdvItem::known; null for
  // bands.
  __device__ __forceinline__ const int4* known(const BwdParams& p, const DkdvWork& w) const {
    if (entries != nullptr) return entries + i / PER_TILE;
    if (p.mask.kind == MaskKind::BAND) return nullptr;
    return p.mask.query_ranges +
           static_cast<int64_t>(mask_of(p, w, head_in_group).plane) * p.mask.query_tiles +
           i / PER_TILE;
  }

 private:
  __device__ __forceinline__ void next_head(const BwdParams& p, const DkdvWork& w) {
    ++head_in_group;
    i = w.begin * PER_TILE;
    if (p.mask.head_planes == 0 || head_in_group >= w.group_heads_end) return;
    const QueryBlockIterator<Config::BLOCK_N> query_blocks = iterator_of(p, w, head_in_group);
    i = query_blocks.begin * PER_TILE;
    end = query_blocks.end * PER_TILE;
  }
};

// Returns the mask's code for the query tile of an item and one of the block's key tiles (half = 0
// or 1).
__device__ __forceinline__ int tile_code(const BwdParams& p, const DkdvWork& w,
                                         const DkdvItem& item, int half) {
  if (p.mask.kind == MaskKind::TILES) return half == 0 ? item.known.y : item.known.z;
  if (p.mask.kind == MaskKind::BAND) {
    const int4 tiles = w.tiles[half];
    const int m = item.row0 / MASK_TILE;
    if (m < tiles.x || m >= tiles.y) return TILE_EMPTY;
    return m >= tiles.z && m < tiles.w ? TILE_FULL : TILE_ROWS;
  }
  const KeyRange range{item.known.x, item.known.y, item.known.z, item.known.w};
  const int key0 = w.key0 / MASK_TILE * MASK_TILE + half * MASK_TILE;
  if (key0 >= w.seqlen_k || !range.touches(key0, MASK_TILE)) return TILE_EMPTY;
  return range.covers(key0, MASK_TILE) ? TILE_FULL : TILE_ROWS;
}

// Finds where the block's dS is stored and, for bands, which query tiles attend to the block's key
// tiles. The chunk starts at key tile `first`.
template <class Config>
__device__ __forceinline__ void find_slots(DkdvWork& work, const BwdParams& p,
                                           const DkdvBlock& block, const Mask& mask,
                                           const DsLayout& layout, int first) {
  const int n = block.key0 / DS_TILE;
  const Mask mask0 = DkdvCursor<Config>::mask_of(p, work, 0);
  const int heads_before =  // plus head_in_group: index of a head among the chunk's query heads
      (block.unit * p.group_split + block.split) * p.members - work.group_heads_begin;
  const int slot0 = heads_before * static_cast<int>(p.ds_tiles_per_head);
  for (int half = 0; half < (Config::BLOCK_N > MASK_TILE ? 2 : 1); ++half) {
    work.slot0[half] = slot0 + (mask.is_list() ? -p.mask.key_slots[first]
                                               : slot_base(mask0, layout, first, n + half));
    if (p.mask.kind == MaskKind::BAND) work.tiles[half] = band_tiles(mask, layout, n + half);
  }
}

// Returns the query tiles [x, y) of a block's query split. The tiles of the longest sequence are
// divided equally among the splits, so x and y may be past the last tile.
__device__ __forceinline__ int2 find_query_tiles(const BwdParams& p, const DkdvBlock& block) {
  const int tiles = (p.seqlen_q + MASK_TILE - 1) / MASK_TILE;
  const int each = (tiles + p.query_split - 1) / p.query_split;
  return {block.query_split * each, (block.query_split + 1) * each};
}

// Finds the work of a block and stores it in `work`. head: the first query head of the group. mask:
// the mask of the block's first query head.
template <class Config>
__device__ __forceinline__ void find_work(DkdvWork& work, const BwdParams& p,
                                          const DkdvBlock& block, const Sequence& sequence,
                                          int heads_per_split, int head, const Mask& mask) {
  const DsLayout layout = ds_layout(p, sequence);
  const int first = p.key_begin / DS_TILE;
  work.key0 = block.key0;
  if constexpr (Config::SHARES_QUERIES) work.query_tiles = find_query_tiles(p, block);
  const QueryBlockIterator<Config::BLOCK_N> query_blocks =
      DkdvCursor<Config>::iterator_of(mask, layout, work);
  work.q = head_begin(p.q, block.batch, block.head_kv, 0) + sequence.q0 * p.q.row;
  work.dout = head_begin(p.dout, block.batch, block.head_kv, 0) + sequence.q0 * p.dout.row;
  work.statistics = statistics_begin(p, block.batch, head, sequence.q0);
  work.entries = query_blocks.entries;
  work.begin = query_blocks.begin;
  work.end = query_blocks.end;
  work.batch = block.batch;
  work.head = head;
  work.group_heads_begin = block.split * heads_per_split + p.member_begin;
  work.group_heads_end = work.group_heads_begin + p.members;
  work.seqlen_q = sequence.seqlen_q;
  work.seqlen_k = sequence.seqlen_k;
  find_slots<Config>(work, p, block, mask, layout, first);
}

}  // namespace flash_dist

// The order of summation of dK and dV: the stages of queries that a block of keys goes through, and
// what its warps need to know of each.
#pragma once

#include "core/block_iterators.cuh"
#include "core/params.h"

namespace flash_dist {

// Where a block of the dK/dV kernel works, for all its threads, in shared memory.
struct DkdvWork {
  const uint16_t *q, *dout;  // first query of the kv head's member 0
  int64_t statistics;        // row of that query
  const int4* entries;       // of the walk of members_begin; of all where the mask has one plane
  int begin, end;            // of that walk
  int batch, head;           // head: query head of member 0
  int members_begin, members_end;
  int seqlen_q, seqlen_k;
  int key0;
  int2 query_tiles;  // of a block that shares the queries: [x, y)
  int slot0[2];   // of query tile 0, as if of member 0, among all of the chunk; the two key tiles
  int4 tiles[2];  // BAND: the query tiles of each
};

// One pipeline item: a stage of queries of one query head.
struct DkdvItem {
  int4 known;  // ROWS: the queries' KeyRange; TILES: the list's entry
  int row0;
  int member;   // of the group
  int slot[2];  // of the two key tiles that a block can have, -1: not stored
};

// The pipeline's items one after the other: query head by query head, tile by tile.
template <class Config>
struct DkdvCursor {
  static constexpr int PER_TILE = MASK_TILE / Config::BLOCK_M;
  int member, i, end;  // i, end: stages of this member, PER_TILE to a step of the walk
  const int4* entries;

  __device__ __forceinline__ DkdvCursor(const BwdParams& p, const DkdvWork& w)
      : member(w.members_begin), i(w.begin * PER_TILE), end(w.end * PER_TILE), entries(w.entries) {
    while (i >= end && member < w.members_end) next_member(p, w);
  }
  __device__ __forceinline__ void next(const BwdParams& p, const DkdvWork& w) {
    ++i;
    while (i >= end && member < w.members_end) next_member(p, w);
  }
  __device__ __forceinline__ int row0() const {
    const int tile = entries == nullptr ? i / PER_TILE : entries[i / PER_TILE].x;
    return tile * MASK_TILE + i % PER_TILE * Config::BLOCK_M;
  }

  __device__ __forceinline__ static Mask mask_of(const BwdParams& p, const DkdvWork& w,
                                                 int member) {
    const Sequence sequence{0, 0, w.seqlen_q, w.seqlen_k};
    return Mask(p.mask, MaskPlace(p.mask, sequence, w.batch, w.head + member));
  }
  __device__ __forceinline__ static QueryBlockIterator<Config::BLOCK_N> walk_of(const BwdParams& p,
                                                                                const DkdvWork& w,
                                                                                int member) {
    const Mask mask = mask_of(p, w, member);
    return walk_of(mask, ds_layout(p, {0, 0, w.seqlen_q, w.seqlen_k}), w);
  }
  __device__ __forceinline__ static QueryBlockIterator<Config::BLOCK_N> walk_of(
      const Mask& mask, const DsLayout& layout, const DkdvWork& w) {
    QueryBlockIterator<Config::BLOCK_N> walk(mask, layout, w.key0);
    if constexpr (Config::SHARES_QUERIES) walk.clip(w.stripe);
    return walk;
  }
  // All stages of the block.
  __device__ __forceinline__ static int count(const BwdParams& p, const DkdvWork& w) {
    const int members = w.members_end - w.members_begin;
    if (p.mask.head_planes == 0) return max(w.end - w.begin, 0) * PER_TILE * members;
    int steps = 0;
    for (int member = w.members_begin; member < w.members_end; ++member) {
      const QueryBlockIterator<Config::BLOCK_N> walk = walk_of(p, w, member);
      steps += max(walk.end - walk.begin, 0);
    }
    return steps * PER_TILE;
  }

  // Slots of the item's dS, one thread's work.
  __device__ __forceinline__ int slot(const BwdParams& p, const DkdvWork& w, int half) const {
    if (p.ds == nullptr) return -1;
    const int head = member * static_cast<int>(p.ds_tiles_per_head);
    if (entries != nullptr) {
      const int2 slots = p.mask.by_key[Config::BLOCK_N > MASK_TILE].slots[i / PER_TILE];
      const int slot = half == 0 ? slots.x : slots.y;
      return slot < 0 ? -1 : w.slot0[half] + head + slot;
    }
    if (p.mask.head_planes == 0) return w.slot0[half] + head + i / PER_TILE;
    const int first = p.key_begin / DS_TILE;
    const Mask mask = mask_of(p, w, member);
    const DsLayout layout = ds_layout(p, {0, 0, w.seqlen_q, w.seqlen_k});
    const int n = w.key0 / DS_TILE;
    return w.slot0[half] - slot_base(mask_of(p, w, 0), layout, first, n + half) +
           slot_base(mask, layout, first, n + half) + head + i / PER_TILE;
  }

  // What compute() needs to know of the tiles' mask, 16 bytes; null for bands.
  __device__ __forceinline__ const int4* known(const BwdParams& p, const DkdvWork& w) const {
    if (entries != nullptr) return entries + i / PER_TILE;
    if (p.mask.kind == MaskKind::BAND) return nullptr;
    return p.mask.query_ranges +
           static_cast<int64_t>(mask_of(p, w, member).plane) * p.mask.query_tiles + i / PER_TILE;
  }

 private:
  __device__ __forceinline__ void next_member(const BwdParams& p, const DkdvWork& w) {
    ++member;
    i = w.begin * PER_TILE;
    if (p.mask.head_planes == 0 || member >= w.members_end) return;
    const QueryBlockIterator<Config::BLOCK_N> walk = walk_of(p, w, member);
    i = walk.begin * PER_TILE;
    end = walk.end * PER_TILE;
  }
};

// What is known of an item's tile of 64 queries and one of the block's key tiles.
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

}  // namespace flash_dist

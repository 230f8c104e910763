// Iterators over the key or query blocks that a thread block computes: a range without the fully
// masked blocks at its ends, or a list of blocks with visible scores. Also finds where the dS of a
// key or query block is stored.
#pragma once

#include "core/ds_layout.h"
#include "core/mask.cuh"
#include "core/sequence.cuh"

namespace flash_dist {

// The key blocks, BLOCK_N keys each, that a block of queries visits: a range, or parts of a list of
// 64-key tiles. Their indices are [begin, end). Blocks in [full_begin, full_end) need no mask.
template <int BLOCK_M, int BLOCK_N>
struct KeyBlockIterator {
  static_assert(MASK_TILE % BLOCK_N == 0 && (BLOCK_M <= MASK_TILE || BLOCK_M == 2 * MASK_TILE));
  static constexpr int SUB = MASK_TILE / BLOCK_N;
  int begin, full_begin, full_end, end;
  const int4* entries;  // entries of a list; null: a range

  __device__ __forceinline__ KeyBlockIterator(const Mask& mask, int row0) {
    if (mask.is_list()) {
      constexpr bool PAIRS = BLOCK_M > MASK_TILE;
      const TileList& list = mask.p.by_query[PAIRS];
      const int lines = PAIRS ? (mask.p.query_tiles + 1) / 2 : mask.p.query_tiles;
      const int line = mask.plane * lines + row0 / (PAIRS ? 2 * MASK_TILE : MASK_TILE);
      const int first = list.begin[line];
      entries = list.entries + first;
      begin = full_begin = full_end = 0;
      end = (list.begin[line + 1] - first) * SUB;
    } else {
      entries = nullptr;
      const KeyRange r = mask.range(row0, BLOCK_M);
      begin = r.begin_min / BLOCK_N;
      end = (r.end_max + BLOCK_N - 1) / BLOCK_N;
      full_end = min(max(r.end_min / BLOCK_N, begin), end);
      full_begin = min(max((r.begin_max + BLOCK_N - 1) / BLOCK_N, begin), full_end);
    }
  }

  // True if block j needs no mask.
  __device__ __forceinline__ bool is_full(int j) const { return j >= full_begin && j < full_end; }
  // Returns the first key of block j.
  __device__ __forceinline__ int key0(int j) const {
    return entries == nullptr ? j * BLOCK_N : entries[j / SUB].x * MASK_TILE + j % SUB * BLOCK_N;
  }
  // Returns the mask's code of block j for the first or second half of the queries (half = 0 or 1);
  // TILE_ROWS for a range.
  __device__ __forceinline__ int code(int j, int half) const {
    if (entries == nullptr) return TILE_ROWS;
    return half == 0 ? entries[j / SUB].y : entries[j / SUB].z;
  }
};

// The query tiles, 64 queries each, that a block of keys visits for one query head: a range, or
// entries of a list.
template <int BLOCK_N>
struct QueryBlockIterator {
  static constexpr bool PAIRS = BLOCK_N > MASK_TILE;
  static_assert(BLOCK_N <= 2 * MASK_TILE);
  int begin, end;
  const int4* entries;  // entries of a list; null: a range

  __device__ __forceinline__ QueryBlockIterator(const Mask& mask, const DsLayout& layout, int key0)
      : entries(nullptr) {
    const MaskParams& p = mask.p;
    const int n = key0 / MASK_TILE;
    const int last = PAIRS ? min(n + 1, (mask.seqlen_k - 1) / MASK_TILE) : n;
    if (mask.is_list()) {
      const TileList& list = p.by_key[PAIRS];
      const int lines = PAIRS ? (p.key_tiles + 1) / 2 : p.key_tiles;
      const int* first = list.begin + mask.plane * lines + (PAIRS ? n / 2 : n);
      entries = list.entries;
      begin = first[0];
      end = first[1];
    } else if (p.kind == MaskKind::BAND) {
      begin = layout.query_begin(n);
      end = layout.query_end(last);
    } else {
      const int2* ranges = p.key_ranges + static_cast<int64_t>(mask.plane) * p.key_tiles;
      begin = ranges[n].x;
      end = ranges[n].y;
      if (last > n && ranges[last].y > 0) {
        begin = end > 0 ? min(begin, ranges[last].x) : ranges[last].x;
        end = max(end, ranges[last].y);
      }
    }
  }

  // Restricts a range to the query tiles [tiles.x, tiles.y). A list stays as it is.
  __device__ __forceinline__ void clip(int2 tiles) {
    if (entries != nullptr) return;
    begin = max(begin, tiles.x);
    end = min(end, tiles.y);
  }
};

// Returns the dS layout of a band for the lengths of one sequence.
__device__ __forceinline__ DsLayout ds_layout(const BwdParams& p, const Sequence& sequence) {
  return DsLayout(p.mask, sequence.seqlen_q, sequence.seqlen_k, p.packing.cu_seqlens_q != nullptr,
                  p.seqlen_q);
}

// Returns the base of key tile n's dS slots: base + m is the slot of query tile m. Query tile 0 may
// have no slot. Slots count from key tile `first`. For masks of kind BAND and ROWS.
__device__ __forceinline__ int slot_base(const Mask& mask, const DsLayout& layout, int first,
                                         int n) {
  const MaskParams& p = mask.p;
  if (p.kind == MaskKind::BAND) return static_cast<int>(layout.slot(first, n, 0));
  if (n >= p.key_tiles) return 0;
  const int begin = p.key_ranges[static_cast<int64_t>(mask.plane) * p.key_tiles + n].x;
  return p.key_slots[n] - p.key_slots[first] - begin;
}

// Returns the query tiles of a band for key tile n: tiles [x, y) attend to some of its keys, and in
// tiles [z, w) all queries attend to all of its keys.
__device__ __forceinline__ int4 band_tiles(const Mask& mask, const DsLayout& layout, int n) {
  const int key0 = n * MASK_TILE;
  if (key0 >= mask.seqlen_k) return {0, 0, 0, 0};
  int4 tiles{layout.query_begin(n), layout.query_end(n), 0, 0};
  if (key0 + MASK_TILE > mask.seqlen_k) return tiles;
  // The queries that attend to all keys of the tile begin with the first query that attends to the
  // tile's last key, and end with the last query that attends to the tile's first key.
  const MaskParams& p = mask.p;
  const int first = p.right < UNBOUNDED ? key0 + MASK_TILE - 1 - mask.shift() - p.right : 0;
  tiles.z = max(first + MASK_TILE - 1, 0) / MASK_TILE;
  tiles.w = layout.query_tiles();
  if (p.left < UNBOUNDED) {
    tiles.w = min(tiles.w, max(key0 - mask.shift() + p.left + 1, 0) / MASK_TILE);
  }
  return tiles;
}

// The stored dS tiles that a block of the dQ kernel multiplies by K: one for each key tile of the
// chunk that is visible to the block's queries. They are a range, or entries of a list.
template <int BLOCK_M>
struct DsBlockIterator {
  static constexpr bool PAIRS = BLOCK_M > MASK_TILE;
  int begin, end;
  const int4* entries;  // entries of a list; null: a range
  const int2* slots;

  __device__ __forceinline__ DsBlockIterator(const BwdParams& p, const Mask& mask, int row0)
      : entries(nullptr), slots(nullptr) {
    const int first = p.key_begin / DS_TILE;
    const int last = (p.key_end + DS_TILE - 1) / DS_TILE;
    if (mask.is_list()) {
      const TileList& list = p.mask.by_query[PAIRS];
      const int lines = PAIRS ? (p.mask.query_tiles + 1) / 2 : p.mask.query_tiles;
      const int line = mask.plane * lines + row0 / (PAIRS ? 2 * MASK_TILE : MASK_TILE);
      entries = list.entries;
      slots = list.slots;
      begin = lower_bound(list.begin[line], list.begin[line + 1], first);
      end = lower_bound(begin, list.begin[line + 1], last);
    } else {
      const KeyRange range = mask.range(row0, BLOCK_M);
      begin = max(range.begin_min / DS_TILE, first);
      end = min((range.end_max + DS_TILE - 1) / DS_TILE, last);
    }
  }

 private:
  // Returns the first entry in [low, high) whose tile is >= `tile`.
  __device__ __forceinline__ int lower_bound(int low, int high, int tile) const {
    while (low < high) {
      const int middle = (low + high) / 2;
      if (entries[middle].x < tile) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

}  // namespace flash_dist

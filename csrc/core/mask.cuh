// Which keys a query sees. The loops over tiles ask here which tiles hold any visible score and
// which hold only visible ones; the elements of the others are tested against words of 32 keys.
//
// The kind of mask is a run-time value: it is looked at once per tile, never per element.
#pragma once

#include "core/ds_layout.h"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "params.h"

namespace flash_dist {

// Bits [begin, end) of a word, both clipped to 0..32.
__device__ __forceinline__ uint32_t bit_span(int begin, int end) {
  const auto from = [](int bit) {  // shl gives 0 for 32 and more
    uint32_t x;
    asm("shl.b32 %0, 0xffffffff, %1;" : "=r"(x) : "r"(max(bit, 0)));
    return x;
  };
  return from(begin) & ~from(end);
}

// Over some queries: where their keys begin, at least and at most, and end.
struct KeyRange {
  int begin_min, begin_max, end_min, end_max;

  // Whether any score of the keys [key0, key0 + keys) may be visible.
  __device__ __forceinline__ bool touches(int key0, int keys) const {
    return begin_min < key0 + keys && end_max > key0;
  }
  // Whether all of them are.
  __device__ __forceinline__ bool covers(int key0, int keys) const {
    return begin_max <= key0 && end_min >= key0 + keys;
  }
};

// Which part of a mask a query head of one batch entry meets.
struct MaskPlace {
  int seqlen_q, seqlen_k;
  int plane;  // of the arrays

  __device__ __forceinline__ MaskPlace(const MaskParams& p, const Sequence& sequence, int batch,
                                       int head)
      : seqlen_q(sequence.seqlen_q),
        seqlen_k(sequence.seqlen_k),
        plane(batch * p.batch_planes + head * p.head_planes) {}
};

struct Mask : MaskPlace {
  const MaskParams& p;

  __device__ __forceinline__ Mask(const MaskParams& params, const MaskPlace& place)
      : MaskPlace(place), p(params) {}

  __device__ __forceinline__ bool is_list() const { return p.kind == MaskKind::TILES; }

  // Keys that exist: others are not read. first = 0 unless there is padding on the left.
  __device__ __forceinline__ RowSpan keys_that_exist(int batch) const {
    if (p.key_bounds == nullptr) return {0, seqlen_k};
    const int2 bounds = p.key_bounds[p.batch_planes == 0 ? 0 : batch];
    return {bounds.x, bounds.y};
  }

  // The band's ends for query i.
  __device__ __forceinline__ int band_begin(int i) const {
    if (p.left >= UNBOUNDED) return 0;
    return min(max(i + shift() - p.left, 0), seqlen_k);
  }
  __device__ __forceinline__ int band_end(int i) const {
    if (p.right >= UNBOUNDED) return seqlen_k;
    return min(max(i + shift() + p.right + 1, 0), seqlen_k);
  }

  // The keys [x, y) of query i; of the last query where i lies beyond it.
  __device__ __forceinline__ int2 keys(int i) const {
    if (p.kind == MaskKind::BAND) return {band_begin(i), band_end(i)};
    return p.rows[static_cast<int64_t>(plane) * p.query_tiles * MASK_TILE + min(i, seqlen_q - 1)];
  }

  // What the queries [row0, row0 + rows) see, rows beyond the end left out; bands and ROWS.
  __device__ __forceinline__ KeyRange range(int row0, int rows) const {
    const int last = min(row0 + rows, seqlen_q) - 1;
    if (p.kind == MaskKind::BAND) {
      return {band_begin(row0), band_begin(last), band_end(row0), band_end(last)};
    }
    const int4* tiles = p.query_ranges + static_cast<int64_t>(plane) * p.query_tiles;
    int4 all = tiles[row0 / MASK_TILE];
    for (int m = row0 / MASK_TILE + 1; m <= last / MASK_TILE; ++m) {
      const int4 one = tiles[m];
      // An empty tile (0, 0, 0, 0) makes nothing full and adds nothing.
      if (one.w > 0) {
        all.x = all.w > 0 ? min(all.x, one.x) : one.x;
        all.w = max(all.w, one.w);
      }
      all.y = max(all.y, one.y);
      all.z = min(all.z, one.z);
    }
    return {all.x, all.y, all.z, all.w};
  }

  // Bit j: query i sees key key0 + j. key0 is a multiple of 32; code says what is known of the tile
  // that holds them (TILE_ROWS for masks that are not lists).
  __device__ __forceinline__ uint32_t word(int i, int key0, int code) const {
    if (code >= 0) {
      const uint2 bits = p.bits[static_cast<int64_t>(code) * MASK_TILE + i % MASK_TILE];
      return key0 % MASK_TILE != 0 ? bits.y : bits.x;
    }
    if (code != TILE_ROWS) return code == TILE_FULL ? ~0u : 0u;
    const int2 range = keys(i);
    return bit_span(range.x - key0, range.y - key0);
  }

  __device__ __forceinline__ int shift() const { return p.bottom_right ? seqlen_k - seqlen_q : 0; }
};

// The key tiles that a block of queries walks through, BLOCK_N keys each: a range, or a list of
// 64-key tiles. Steps are numbered upwards from `begin` to `end`; those in [full_begin, full_end)
// need no test.
template <int BLOCK_M, int BLOCK_N>
struct KeyWalk {
  static_assert(MASK_TILE % BLOCK_N == 0 && (BLOCK_M <= MASK_TILE || BLOCK_M == 2 * MASK_TILE));
  static constexpr int SUB = MASK_TILE / BLOCK_N;
  int begin, full_begin, full_end, end;
  const int4* entries;  // null: a range

  __device__ __forceinline__ KeyWalk(const Mask& mask, int row0) {
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

  // First key of step j.
  __device__ __forceinline__ int key0(int j) const {
    return entries == nullptr ? j * BLOCK_N : entries[j / SUB].x * MASK_TILE + j % SUB * BLOCK_N;
  }
  // What is known of step j for a warp in the given half (0 or 1) of the block's queries.
  __device__ __forceinline__ int code(int j, int half) const {
    if (entries == nullptr) return TILE_ROWS;
    return half == 0 ? entries[j / SUB].y : entries[j / SUB].z;
  }
};

// The query tiles that a block of keys walks through for one query head, 64 queries each: a range,
// or the entries of a list.
template <int BLOCK_N>
struct QueryWalk {
  static constexpr bool PAIRS = BLOCK_N > MASK_TILE;
  static_assert(BLOCK_N <= 2 * MASK_TILE);
  int begin, end;
  const int4* entries;  // null: a range

  __device__ __forceinline__ QueryWalk(const Mask& mask, const DsLayout& layout, int key0)
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

  __device__ __forceinline__ int query_tile(int i) const {
    return entries == nullptr ? i : entries[i].x;
  }
};

// Slot of query tile 0 under key tile n, as if it had one; add the query tile. Bands and ROWS,
// counted from key tile first.
__device__ __forceinline__ int slot_base(const Mask& mask, const DsLayout& layout, int first,
                                         int n) {
  const MaskParams& p = mask.p;
  if (p.kind == MaskKind::BAND) return static_cast<int>(layout.slot(first, n, 0));
  if (n >= p.key_tiles) return 0;
  const int begin = p.key_ranges[static_cast<int64_t>(mask.plane) * p.key_tiles + n].x;
  return p.key_slots[n] - p.key_slots[first] - begin;
}

}  // namespace flash_dist

// The tiles of the spilled dS that a block of the dQ kernel multiplies with K.
#pragma once

#include "core/block_iterators.cuh"

namespace flash_dist {

// The key tiles of a block of queries within the chunk's keys: a range, or entries of a list.
template <int BLOCK_M>
struct DsBlockIterator {
  static constexpr bool PAIRS = BLOCK_M > MASK_TILE;
  int begin, end;
  const int4* entries;  // null: a range
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
  // The first entry in [low, high) of a tile >= tile.
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

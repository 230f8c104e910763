// The mask of a visit's scores, for the gradient of a bias on Hopper.
#pragma once

#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "sm90/bwd_bias/config.h"

namespace flash_dist {

// Mask codes of a visit's four quarters of 64 x 64 scores, at 2 * (query half) + key half.
struct VisitCodes {
  int of[4] = {TILE_EMPTY, TILE_EMPTY, TILE_EMPTY, TILE_EMPTY};

  __device__ __forceinline__ bool any() const {
    bool is_visible = false;
#pragma unroll
    for (int code : of) is_visible |= code != TILE_EMPTY;
    return is_visible;
  }

  __device__ __forceinline__ void find(const BiasGradientSm90Params& all, const BiasTileWork& tile,
                                       int number) {
    const BwdParams& p = all.p;
    const BiasVisit visit(all, tile.part, number);
    const Sequence sequence(p, visit.batch);
    if (tile.row0 >= sequence.seqlen_q || tile.key0 >= sequence.seqlen_k) return;
    const Mask mask(p.mask, MaskPlace(p.mask, sequence, visit.batch, visit.head));
    if (mask.is_list()) {
      find_in_list(mask, tile);
      return;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int row0 = tile.row0 + m * MASK_TILE;
      if (row0 >= sequence.seqlen_q) continue;
      const KeyRange range = mask.range(row0, MASK_TILE);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int key0 = tile.key0 + n * MASK_TILE;
        if (key0 >= sequence.seqlen_k || !range.touches(key0, MASK_TILE)) continue;
        of[2 * m + n] = range.covers(key0, MASK_TILE) ? TILE_FULL : TILE_ROWS;
      }
    }
  }

 private:
  // Looks for the tile's keys in the list of its 128 queries, whose entries are ascending.
  __device__ __forceinline__ void find_in_list(const Mask& mask, const BiasTileWork& tile) {
    const TileList& list = mask.p.by_query[1];
    const int lines = (mask.p.query_tiles + 1) / 2;
    const int* ends = list.begin + mask.plane * lines + tile.row0 / (2 * MASK_TILE);
    const int key_tile = tile.key0 / MASK_TILE, end = ends[1];
    int low = ends[0], high = end;
    while (low < high) {  // finds the first entry from key_tile on
      const int middle = (low + high) / 2;
      if (list.entries[middle].x < key_tile) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (low >= end) return;
      const int4 entry = list.entries[low];
      if (entry.x != key_tile + n) continue;
      of[n] = entry.y;
      of[2 + n] = entry.z;
      ++low;
    }
  }
};

}  // namespace flash_dist

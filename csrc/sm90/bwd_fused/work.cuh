// The items of a block of the fused backward, and the order in which blocks add to dQ.
#pragma once

#include "sm90/bwd/work.cuh"

namespace flash_dist {

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

}  // namespace flash_dist

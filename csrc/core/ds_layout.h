// The layout of the stored dS in memory. dS^T of one query head is split into 64x64 tiles (key
// tile n, query tile m). Every tile with visible scores has a slot; most fully masked tiles of
// causal masks and two-sided windows have none. Slots are ordered by key tile, then by query tile.
// A tile is 4 x 4 blocks of 16 keys by 16 queries. A block is stored as the A fragment of mma
// m16n8k16: 16 bytes per lane.
//
// This is the layout for bands, whose slots are computed from the band and the sequence lengths.
// Masks with arrays store their slots (MaskParams::key_slots, TileList::slots).
#pragma once

#include <cstdint>

#include "core/band.h"

namespace flash_dist {

constexpr int DS_TILE = MASK_TILE;
constexpr int DS_TILE_BYTES = DS_TILE * DS_TILE * 2;
constexpr int DS_BLOCK_BYTES = 16 * 16 * 2;

class DsLayout {
 public:
  // Computes the layout for one sequence with seqlen_q queries and seqlen_k keys. dense: each key
  // tile has a slot for each query tile of the longest sequence, which has longest_q queries. This
  // is used for packed tensors, because the host does not know the lengths of their sequences.
  template <class Mask>  // MaskBand on the host, MaskParams in kernels
  FLASH_DIST_HOST_DEVICE DsLayout(const Mask& mask, int seqlen_q, int seqlen_k, bool dense,
                                  int longest_q)
      : query_tiles_(tiles_up(seqlen_q)) {
    const int shift = mask.bottom_right ? seqlen_k - seqlen_q : 0;
    later_ = mask.right < UNBOUNDED ? tiles_up(shift + mask.right) : FAR;
    earlier_ = mask.left < UNBOUNDED ? floor_tiles(DS_TILE - 1 - shift + mask.left) : FAR;
    if (dense) {
      width_ = tiles_up(longest_q);
    } else if (mask.left >= UNBOUNDED && mask.right < UNBOUNDED) {
      width_ = TRIANGLE;
    } else if (mask.left < UNBOUNDED && mask.right < UNBOUNDED) {
      width_ = (mask.left + mask.right + 2 * DS_TILE - 2) / DS_TILE + 1;
      if (width_ > query_tiles_) width_ = query_tiles_;
    } else {
      width_ = query_tiles_;
    }
    from_begin_ = !dense && (mask.right < UNBOUNDED);
  }

  FLASH_DIST_HOST_DEVICE int query_tiles() const { return query_tiles_; }

  // Query tiles [query_begin(n), query_end(n)) that attend to key tile n; none if begin >= end.
  FLASH_DIST_HOST_DEVICE int query_begin(int n) const { return clamp(n - later_); }
  FLASH_DIST_HOST_DEVICE int query_end(int n) const {
    return earlier_ == FAR ? query_tiles_ : clamp(n + earlier_ + 1);
  }

  // Key tiles [key_begin(m), key_end(m)) visible to query tile m. They may not all exist.
  FLASH_DIST_HOST_DEVICE int key_begin(int m) const {
    return earlier_ == FAR || m < earlier_ ? 0 : m - earlier_;
  }
  FLASH_DIST_HOST_DEVICE int key_end(int m) const { return m + later_ + 1; }

  // Returns the number of slots of the key tiles [first, n) of one head.
  FLASH_DIST_HOST_DEVICE int64_t slots(int first, int n) const {
    if (width_ != TRIANGLE) return static_cast<int64_t>(n - first) * width_;
    return static_cast<int64_t>(n - first) * query_tiles_ - (skipped(n) - skipped(first));
  }

  // Returns the number of slots of key tile n.
  FLASH_DIST_HOST_DEVICE int width(int n) const {
    return width_ != TRIANGLE ? width_ : query_tiles_ - query_begin(n);
  }

  // Returns the slot of (query tile m, key tile n). Slot 0 is the first one of key tile `first`.
  FLASH_DIST_HOST_DEVICE int64_t slot(int first, int n, int m) const {
    return slots(first, n) + m - first_with_slot(n);
  }
  FLASH_DIST_HOST_DEVICE int first_with_slot(int n) const {
    return from_begin_ ? query_begin(n) : 0;
  }

 private:
  static constexpr int FAR = 1 << 30;
  static constexpr int TRIANGLE = -1;

  FLASH_DIST_HOST_DEVICE int clamp(int m) const {
    return m < 0 ? 0 : (m < query_tiles_ ? m : query_tiles_);
  }
  FLASH_DIST_HOST_DEVICE static int floor_tiles(int x) {
    return x >= 0 ? x / DS_TILE : -((-x + DS_TILE - 1) / DS_TILE);
  }
  FLASH_DIST_HOST_DEVICE static int tiles_up(int x) { return -floor_tiles(-x); }

  // Returns the number of slots that the key tiles before n do not have, plus a constant: the sum
  // of min(max(i - later, 0), query_tiles) over min(later, 0) <= i < n.
  FLASH_DIST_HOST_DEVICE int64_t skipped(int n) const {
    const int64_t k = static_cast<int64_t>(n) - later_;
    if (k <= 0) return 0;
    if (k <= query_tiles_) return k * (k - 1) / 2;
    return static_cast<int64_t>(query_tiles_) * (query_tiles_ - 1) / 2 +
           (k - query_tiles_) * query_tiles_;
  }

  int query_tiles_;
  int later_;    // key tile n is visible to query tiles from n - later_ on
  int earlier_;  // key tile n is visible to query tiles up to n + earlier_
  int width_;    // slots per key tile, or TRIANGLE
  bool from_begin_;
};

}  // namespace flash_dist

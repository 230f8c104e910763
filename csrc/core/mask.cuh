// Finds the keys visible to a query, or to any of a few queries. Fully masked tiles are skipped,
// and fully visible tiles need no test. In the other tiles, scores are tested against 32-bit words
// with one bit per key.
//
// The kind of mask is a run-time value, tested once per tile, never per element.
#pragma once

#include "core/accumulator.cuh"
#include "core/params.h"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "ptx/convert.cuh"

namespace flash_dist {

// Returns a word with bits [begin, end) set; both are clamped to 0..32.
__device__ __forceinline__ uint32_t bit_span(int begin, int end) {
  const auto from = [](int bit) { return shift_left(0xffffffffu, max(bit, 0)); };
  return from(begin) & ~from(end);
}

// Bounds of the key ranges [begin, end) of some queries.
struct KeyRange {
  int begin_min, begin_max, end_min, end_max;

  // True if any score of the keys [key0, key0 + keys) may be visible.
  __device__ __forceinline__ bool touches(int key0, int keys) const {
    return begin_min < key0 + keys && end_max > key0;
  }
  // True if all scores of the keys [key0, key0 + keys) are visible.
  __device__ __forceinline__ bool covers(int key0, int keys) const {
    return begin_max <= key0 && end_min >= key0 + keys;
  }
};

// The part of a mask for one batch entry and query head.
struct MaskPlace {
  int seqlen_q, seqlen_k;
  int plane;  // index of the plane in the mask's arrays

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

  // Returns a range that contains all keys visible to any query of the batch entry. No key outside
  // the range is read.
  __device__ __forceinline__ RowSpan keys_that_exist(int batch) const {
    if (p.kind == MaskKind::BAND) return {band_begin(0), band_end(seqlen_q - 1)};
    if (p.key_bounds == nullptr) return {0, seqlen_k};
    const int2 bounds = p.key_bounds[p.batch_planes == 0 ? 0 : batch];
    return {bounds.x, bounds.y};
  }

  // Begin and end of the key range of query i in a band.
  __device__ __forceinline__ int band_begin(int i) const {
    if (p.left >= UNBOUNDED) return 0;
    return min(max(i + shift() - p.left, 0), seqlen_k);
  }
  __device__ __forceinline__ int band_end(int i) const {
    if (p.right >= UNBOUNDED) return seqlen_k;
    return min(max(i + shift() + p.right + 1, 0), seqlen_k);
  }

  // Returns the keys [x, y) visible to query i; for ROWS, to the last query if i is past it.
  __device__ __forceinline__ int2 keys(int i) const {
    if (p.kind == MaskKind::BAND) return {band_begin(i), band_end(i)};
    return p.rows[static_cast<int64_t>(plane) * p.query_tiles * MASK_TILE + min(i, seqlen_q - 1)];
  }

  // Returns the bounds of the key ranges of the queries in [row0, row0 + rows) that exist. Only for
  // BAND and ROWS. For ROWS, the bounds are those of all queries in the same tiles of 64.
  __device__ __forceinline__ KeyRange range(int row0, int rows) const {
    const int last = min(row0 + rows, seqlen_q) - 1;
    if (p.kind == MaskKind::BAND) {
      return {band_begin(row0), band_begin(last), band_end(row0), band_end(last)};
    }
    const int4* tiles = p.query_ranges + static_cast<int64_t>(plane) * p.query_tiles;
    int4 all = tiles[row0 / MASK_TILE];
    for (int m = row0 / MASK_TILE + 1; m <= last / MASK_TILE; ++m) {
      const int4 one = tiles[m];
      // A query tile without visible keys is (0, 0, 0, 0). It must not lower begin_min, but its
      // end_min of 0 makes covers() false.
      if (one.w > 0) {
        all.x = all.w > 0 ? min(all.x, one.x) : one.x;
        all.w = max(all.w, one.w);
      }
      all.y = max(all.y, one.y);
      all.z = min(all.z, one.z);
    }
    return {all.x, all.y, all.z, all.w};
  }

  // Returns a word whose bit j is set if key key0 + j is visible to query i. key0 is a multiple of
  // 32. code: the mask's code of the tile with these keys (TILE_ROWS if the mask is not a list).
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

// Sets masked scores of a warp to -inf. S has MT * 16 queries from row0 on and NT * 8 keys from
// key0 on. The keys fill words of 32 aligned keys, or all lie in the same word.
template <int MT, int NT>
__device__ __forceinline__ void apply_mask(Accumulator<MT, NT>& s, const Mask& mask, int row0,
                                           int key0, int code) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int w = 0; w < (NT + 3) / 4; ++w) {
        const int key = key0 + w * 32;
        const uint32_t word = mask.word(row0 + m * 16 + h * 8 + lane / 4, key / 32 * 32, code) >>
                              (key % 32 + lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < 4 && w * 4 + n < NT; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(word >> (n * 8 + e) & 1)) s.x[m][w * 4 + n][2 * h + e] = -INFINITY;
      }
}

// Sets masked scores of S^T to -inf: MT * 16 keys from key0 on, within one aligned word of 32, and
// NT * 8 queries from row0 on.
template <int MT, int NT>
__device__ __forceinline__ void apply_mask_transposed(Accumulator<MT, NT>& st, const Mask& mask,
                                                      int row0, int key0, int code) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t word = mask.word(row0 + n * 8 + (lane % 4) * 2 + e, key0 / 32 * 32, code) >>
                            (key0 % 32 + lane / 4);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if (!(word >> (m * 16 + h * 8) & 1)) st.x[m][n][2 * h + e] = -INFINITY;
    }
}

}  // namespace flash_dist

#include "mask.h"

#include <algorithm>

namespace flash_dist::debug {

namespace {

constexpr int TILE = 64;  // the same as MASK_TILE of core/band.h

int tiles(int seqlen) { return (seqlen + TILE - 1) / TILE; }

Keys band_keys(const Mask& mask, int query, int seqlen_q, int seqlen_k) {
  const int center = query + (mask.bottom_right ? seqlen_k - seqlen_q : 0);
  return {mask.left < 0 ? 0 : center - mask.left,
          mask.right < 0 ? seqlen_k : center + mask.right + 1};
}

// Returns the keys that are visible to a query: those of its block and of earlier blocks. Position
// i is in block i / ceil(seqlen / blocks).
Keys block_causal_keys(const Mask& mask, int query, int seqlen_q, int seqlen_k) {
  const int queries = (seqlen_q + mask.blocks - 1) / mask.blocks;
  const int keys = (seqlen_k + mask.blocks - 1) / mask.blocks;
  return {0, (query / queries + 1) * keys};
}

// Appends a query tile's element of query_ranges: minima and maxima over rows with visible keys. If
// a row has none, the second and the third number are 0, so that KeyRange::covers() is false.
void append_query_range(std::vector<int>& ranges, const std::vector<int>& rows, int tile,
                        int seqlen_q, int seqlen_k) {
  int least_begin = seqlen_k, greatest_begin = 0, least_end = seqlen_k, greatest_end = 0;
  bool some_empty = false;
  for (int i = tile * TILE; i < std::min(seqlen_q, (tile + 1) * TILE); ++i) {
    const int begin = rows[2 * i], end = rows[2 * i + 1];
    if (begin == end) {
      some_empty = true;
      continue;
    }
    least_begin = std::min(least_begin, begin);
    greatest_begin = std::max(greatest_begin, begin);
    least_end = std::min(least_end, end);
    greatest_end = std::max(greatest_end, end);
  }
  if (some_empty) greatest_begin = least_end = 0;  // so that KeyRange::covers() is false
  if (greatest_end == 0) least_begin = 0;
  ranges.insert(ranges.end(), {least_begin, greatest_begin, least_end, greatest_end});
}

}  // namespace

Keys visible_keys(const Mask& mask, int query, int seqlen_q, int seqlen_k) {
  const Keys keys = mask.form == Mask::Form::BAND
                        ? band_keys(mask, query, seqlen_q, seqlen_k)
                        : block_causal_keys(mask, query, seqlen_q, seqlen_k);
  const int begin = std::max(keys.begin, 0), end = std::min(keys.end, seqlen_k);
  return begin < end ? Keys{begin, end} : Keys{0, 0};
}

RowArrays row_arrays(const Mask& mask, int seqlen_q, int seqlen_k) {
  const int query_tiles = tiles(seqlen_q), key_tiles = tiles(seqlen_k);
  RowArrays arrays;
  arrays.rows.assign(2 * TILE * query_tiles, 0);
  for (int i = 0; i < seqlen_q; ++i) {
    const Keys keys = visible_keys(mask, i, seqlen_q, seqlen_k);
    arrays.rows[2 * i] = keys.begin;
    arrays.rows[2 * i + 1] = keys.end;
  }
  for (int m = 0; m < query_tiles; ++m)
    append_query_range(arrays.query_ranges, arrays.rows, m, seqlen_q, seqlen_k);

  arrays.key_slots.push_back(0);
  for (int n = 0; n < key_tiles; ++n) {
    int first = 0, end = 0;
    for (int m = 0; m < query_tiles; ++m) {
      const int* range = &arrays.query_ranges[4 * m];
      if (range[0] >= TILE * (n + 1) || range[3] <= TILE * n) continue;
      if (end == 0) first = m;
      end = m + 1;
    }
    arrays.key_ranges.insert(arrays.key_ranges.end(), {first, end});
    arrays.key_slots.push_back(arrays.key_slots.back() + end - first);
  }
  return arrays;
}

}  // namespace flash_dist::debug

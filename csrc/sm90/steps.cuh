// The steps of a block of queries over its keys. Each step has BLOCK_N keys.
#pragma once

#include "core/accumulator.cuh"
#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

// The steps [begin, end), in ascending order of keys; those in [full_begin, full_end) need no mask.
struct StepBounds {
  int begin, full_begin, full_end, end;
};

struct KeyBounds : StepBounds {
  const int4* entries;  // entries of a list of tiles; null: the keys are a range
  int count;            // number of entries

  __device__ __forceinline__ KeyBounds(const Mask& mask, int row0, int block_m, int block_n) {
    if (mask.is_list()) {
      const TileList& list = mask.p.by_query[1];
      const int lines = (mask.p.query_tiles + 1) / 2;
      const int line = mask.plane * lines + row0 / (2 * MASK_TILE);
      const int first = list.begin[line];
      entries = list.entries + first;
      count = list.begin[line + 1] - first;
      begin = full_begin = full_end = 0;
      end = (count * MASK_TILE + block_n - 1) / block_n;
    } else {
      entries = nullptr;
      count = 0;
      const KeyRange r = mask.range(row0, block_m);
      begin = r.begin_min / block_n;
      end = (r.end_max + block_n - 1) / block_n;
      full_end = min(max(r.end_min / block_n, begin), end);
      full_begin = min(max((r.begin_max + block_n - 1) / block_n, begin), full_end);
    }
  }
};

// The keys of a step: BLOCK_N adjacent keys (RANGES), PARTS tiles of a list (LISTS), or either,
// depending on the call's mask (BOTH).
enum class KeySource { RANGES, LISTS, BOTH };

template <int BLOCK_N, KeySource SOURCE>
struct KeySteps {
  static constexpr int PARTS = SOURCE == KeySource::RANGES ? 0 : BLOCK_N / MASK_TILE;
  const KeyBounds& bounds;

  __device__ __forceinline__ bool is_list() const {
    return SOURCE == KeySource::LISTS || (SOURCE == KeySource::BOTH && bounds.entries != nullptr);
  }
  // True if part `part` of step j is missing: with an odd number of tiles, the last step has one
  // part.
  __device__ __forceinline__ bool lacks(int j, int part) const {
    return j * PARTS + part >= bounds.count;
  }
  // The entry of part `part` of step j. A missing part repeats the last tile, so that no other keys
  // are read.
  __device__ __forceinline__ const int4& entry(int j, int part) const {
    return bounds.entries[min(j * PARTS + part, bounds.count - 1)];
  }
  // First key of a step, or of a part of a step.
  __device__ __forceinline__ int key0(int j) const { return j * BLOCK_N; }
  __device__ __forceinline__ int key0(int j, int part) const {
    return entry(j, part).x * MASK_TILE;
  }
  // The key of a row of step j; -1 in a missing part.
  __device__ __forceinline__ int key(int j, int row) const {
    if (!is_list()) return key0(j) + row;
    const int part = row / MASK_TILE;
    return lacks(j, part) ? -1 : key0(j, part) + row % MASK_TILE;
  }
  // The mask's code of a part for the first or second half of the block's queries (half = 0 or 1).
  __device__ __forceinline__ int code(int j, int part, int half) const {
    if (lacks(j, part)) return TILE_EMPTY;
    return half == 0 ? entry(j, part).y : entry(j, part).z;
  }
};

// Sets masked scores of 16 queries to -inf, in columns [8 * FIRST, 8 * END) of s. key0: the key of
// the first column, a multiple of 16. word(half, key) returns a bit for each of the 32 keys from
// `key` on, set if the key is visible to this lane's first or second query (half = 0 or 1).
template <int FIRST, int END, int NT, class Word>
__device__ __forceinline__ void mask_columns(Accumulator<1, NT>& s, int key0, const Word& word) {
  constexpr int TILES = (END - FIRST) % 4 == 0 ? 4 : 2;  // 8-key tiles per word
  const int column = fresh_thread() % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int n0 = FIRST; n0 < END; n0 += TILES) {
      const uint32_t bits = word(h, key0 + (n0 - FIRST) * 8) >> column;
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (!(bits >> (n * 8 + e) & 1)) s.x[0][n0 + n][2 * h + e] = -INFINITY;
    }
}

// Sets masked scores of 16 queries to -inf. ranges: the visible keys [x, y) of this lane's two
// queries. key0: the key of the first column.
template <int NT>
__device__ __forceinline__ void mask_ranges(Accumulator<1, NT>& s, const int2 (&ranges)[2],
                                            int key0) {
  mask_columns<0, NT>(
      s, key0, [&](int h, int key) { return bit_span(ranges[h].x - key, ranges[h].y - key); });
}

// Returns the visible keys of query i in a tile of a list: bit j of x is key key0 + j, bit j of y
// is key key0 + 32 + j. The code must not be TILE_FULL.
__device__ __forceinline__ uint2 tile_bits(const Mask& mask, int i, int key0, int code) {
  if (code >= 0) return mask.p.bits[static_cast<int64_t>(code) * MASK_TILE + i % MASK_TILE];
  if (code == TILE_EMPTY) return {0, 0};
  const int2 range = mask.keys(i);
  return {bit_span(range.x - key0, range.y - key0),
          bit_span(range.x - key0 - 32, range.y - key0 - 32)};
}

// The keys of a step that are visible to the two queries of this lane.
template <int BLOCK_N, KeySource SOURCE>
struct VisibleKeys {
  using Steps = KeySteps<BLOCK_N, SOURCE>;
  static constexpr int PARTS = Steps::PARTS;
  static constexpr int TILES = MASK_TILE / 8;
  // The keys of one tile of a list that are visible to the two queries.
  struct Part {
    bool full;
    uint2 bits[2];
  };
  int2 ranges[2];
  Part parts[PARTS == 0 ? 1 : PARTS];

  // Finds the visible keys of step j. half: which half of the block's queries the warp has. row0:
  // the warp's first query.
  __device__ __forceinline__ void find(const Mask& mask, const Steps& steps, int j, int half,
                                       int row0) {
    if (!steps.is_list()) {
      find_ranges(mask, row0);
    } else {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) find_part(mask, steps, j, part, half, row0);
    }
  }

  // Sets masked scores to -inf.
  template <int NT>
  __device__ __forceinline__ void apply(Accumulator<1, NT>& s, const Steps& steps, int j) const {
    if (!steps.is_list()) {
      mask_ranges(s, ranges, steps.key0(j));
    } else {
      if constexpr (PARTS > 0) apply_part<0>(s);
      if constexpr (PARTS == 2) apply_part<1>(s);
    }
  }

  // Does the work of find() and apply() for one part after the other, which needs fewer registers.
  template <int NT>
  __device__ __forceinline__ static void find_and_apply(Accumulator<1, NT>& s, const Mask& mask,
                                                        const Steps& steps, int j, int half,
                                                        int row0) {
    if (!steps.is_list()) {
      const int2 ranges[2] = {mask.keys(row(row0)), mask.keys(row(row0) + 8)};
      mask_ranges(s, ranges, steps.key0(j));
    } else {
      if constexpr (PARTS > 0) find_and_apply_part<0>(s, mask, steps, j, half, row0);
      if constexpr (PARTS == 2) find_and_apply_part<1>(s, mask, steps, j, half, row0);
    }
  }

 private:
  __device__ __forceinline__ static int row(int row0) { return row0 + fresh_thread() % 32 / 4; }

  __device__ __forceinline__ void find_ranges(const Mask& mask, int row0) {
    ranges[0] = mask.keys(row(row0));
    ranges[1] = mask.keys(row(row0) + 8);
  }

  __device__ __forceinline__ void find_part(const Mask& mask, const Steps& steps, int j, int part,
                                            int half, int row0) {
    const int code = steps.code(j, part, half);
    parts[part].full = code == TILE_FULL;
    if (parts[part].full) return;
    const int key0 = steps.key0(j, part);
    parts[part].bits[0] = tile_bits(mask, row(row0), key0, code);
    parts[part].bits[1] = tile_bits(mask, row(row0) + 8, key0, code);
  }

  template <int PART, int NT>
  __device__ __forceinline__ void apply_part(Accumulator<1, NT>& s) const {
    if (parts[PART].full) return;
    const auto& bits = parts[PART].bits;
    mask_columns<PART * TILES, (PART + 1) * TILES>(
        s, 0, [&](int h, int key) { return key == 0 ? bits[h].x : bits[h].y; });
  }

  template <int PART, int NT>
  __device__ __forceinline__ static void find_and_apply_part(Accumulator<1, NT>& s,
                                                             const Mask& mask, const Steps& steps,
                                                             int j, int half, int row0) {
    const int code = steps.code(j, PART, half);
    if (code == TILE_FULL) return;
    const int key0 = steps.key0(j, PART);
    const uint2 bits[2] = {tile_bits(mask, row(row0), key0, code),
                           tile_bits(mask, row(row0) + 8, key0, code)};
    mask_columns<PART * TILES, (PART + 1) * TILES>(
        s, 0, [&](int h, int key) { return key == 0 ? bits[h].x : bits[h].y; });
  }
};

}  // namespace flash_dist

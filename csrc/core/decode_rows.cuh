// Steps on the rows of a work tile: load queries; apply soft cap, ALiBi and masks; store partial
// results, out and lse.
#pragma once

#include "core/accumulator.cuh"
#include "core/combine.cuh"
#include "core/decode_work.cuh"
#include "core/scores.cuh"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "core/uncovered.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

// The rows and columns of a work tile that belong to a warp: 16 rows from row0 on. WARPS_N warps
// share these rows; warp_n is this warp's index among them.
template <class Config_>
struct WarpPlace {
  using Config = Config_;
  int row0, warp_n;

  __device__ __forceinline__ WarpPlace()
      : row0(static_cast<int>(threadIdx.x) / 32 / Config::WARPS_N * 16),
        warp_n(static_cast<int>(threadIdx.x) / 32 % Config::WARPS_N) {}
  // Returns the first or second row of this lane (h = 0 or 1).
  __device__ __forceinline__ int row(int h) const {
    return row0 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h;
  }
  // Returns the first of the two adjacent columns of O in x[0][n]. Blocks of 16 columns go to the
  // warps round-robin.
  __device__ __forceinline__ int column(int n) const {
    return (n / 2 * Config::WARPS_N + warp_n) * 16 + n % 2 * 8 +
           static_cast<int>(threadIdx.x) % 4 * 2;
  }
  // Tells if this lane writes top and sum of its rows.
  __device__ __forceinline__ bool writes_stats() const {
    return warp_n == 0 && threadIdx.x % 4 == 0;
  }
};

// A warp's partial result over some keys: O, top and sum of 16 rows, two rows per lane. O has only
// the warp's columns.
template <int OT>
struct Partial {
  Accumulator<1, OT> out;
  float top[2], sum[2];

  __device__ __forceinline__ void clear() {
    out.clear();
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
  __device__ __forceinline__ void combine(const Partial& later) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Combine combine(top[h], later.top[h]);
      top[h] = combine.top;
      sum[h] = combine(sum[h], later.sum[h]);
#pragma unroll
      for (int n = 0; n < OT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          out.x[0][n][2 * h + e] = combine(out.x[0][n][2 * h + e], later.out.x[0][n][2 * h + e]);
        }
    }
  }
};

// The key ranges visible to the two rows of a lane.
struct TileRows {
  int begin[2], end[2];

  template <class Place>
  __device__ __forceinline__ TileRows(const DecodeParams& p, const DecodeCursor& at,
                                      const Place& own) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.row0(p) + own.row(h);
      const int i = divide(row, p.by_group) + at.extent.shift;  // key on the row's diagonal
      const int last = p.right >= UNBOUNDED ? at.extent.visible_end : i + p.right + 1;
      begin[h] = p.left >= UNBOUNDED ? 0 : max(i - p.left, 0);
      end[h] = min(last, at.extent.visible_end);
      // A row past the last one gets all keys, so that it does not narrow common_keys().
      if (row >= at.extent.rows(p)) begin[h] = 0, end[h] = at.extent.visible_end;
    }
  }

  // Returns the keys visible to both rows.
  __device__ __forceinline__ int2 common_keys() const {
    return {max(begin[0], begin[1]), min(end[0], end[1])};
  }
  // Tells if all keys of the key block that starts at key0 are visible to all rows of the warp.
  __device__ __forceinline__ bool all_visible(int key0) const {
    return all_visible(common_keys(), key0);
  }
  __device__ __forceinline__ static bool all_visible(int2 keys, int key0) {
    return __all_sync(0xffffffffu, keys.x <= key0 && key0 + KEY_BLOCK <= keys.y);
  }
  // Sets masked scores to -inf. The first column of s is key key0.
  template <int NT>
  __device__ __forceinline__ void mask(Accumulator<1, NT>& s, int key0) const {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key0 + n * 8 + threadIdx.x % 4 * 2 + e % 2;
        if (key < begin[e / 2] || key >= end[e / 2]) s.x[0][n][e] = -INFINITY;
      }
  }
};

// Applies soft cap and ALiBi (core/scores.cuh) to the two rows of a lane, which may belong to
// different heads.
struct TileScores {
  float slope[2];
  int diagonal[2];  // key at distance 0: query + seqlen_k - seqlen_q

  template <class Place>
  __device__ __forceinline__ TileScores(const DecodeParams& p, const DecodeCursor& at,
                                        const Place& own) {
    const int shift = CacheKeys(p.cache, at.batch, p.batch).seqlen - at.extent.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(at.row0(p) + own.row(h), at.extent.rows(p) - 1);
      const int query = divide(row, p.by_group);
      slope[h] = alibi_slope(p.scores, at.batch, at.head * p.group + row - query * p.group);
      diagonal[h] = query + shift;
    }
  }
  // Modifies the scores s, whose first column is key key0.
  template <int NT>
  __device__ __forceinline__ void apply_score_mod(Accumulator<1, NT>& s, const DecodeParams& p,
                                                  int key0) const {
    const ScoreParams& scores = p.scores;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = s.x[0][n][e];
        x *= scores.scale_inside;
        if (scores.softcap > FAST_CAP) {
          x = scores.softcap * tanh_near(x);
        } else if (scores.softcap != 0.0f) {
          x = scores.softcap * tanh_of<Tanh::FAST>(x);
        }
        const int key = key0 + n * 8 + threadIdx.x % 4 * 2 + e % 2;
        const float distance = fabsf(static_cast<float>(diagonal[e / 2] - key));
        x = __fmaf_rn(-slope[e / 2], distance, x);
      }
  }
};

// The queries of a work tile. They are loaded into registers, possibly while another tile is
// computed, and later stored to shared memory.
template <class Config>
struct QueryLoader {
  using Layout = typename Config::Layout;
  static constexpr int ALL = Config::BLOCK_ROWS * Layout::CHUNKS;
  static constexpr int CHUNKS = (ALL + Config::THREADS - 1) / Config::THREADS;
  static constexpr bool WHOLE = ALL % Config::THREADS == 0;  // else some threads have fewer chunks
  uint4 chunks[CHUNKS];

  __device__ __forceinline__ void load(const DecodeParams& p, const DecodeCursor& at) {
    const int head = at.head;
    const int row0 = at.row0(p);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int i = c * Config::THREADS + threadIdx.x;
      const int row = row0 + i / Layout::CHUNKS, column = i % Layout::CHUNKS * 8;
      const int query = divide(row, p.by_group);
      const bool exists = (WHOLE || i < ALL) && row < at.extent.rows(p) && column < p.head_dim;
      chunks[c] = exists ? load_global_16(head_begin(p.q, at.batch, head, row - query * p.group) +
                                          (at.extent.q0 + query) * p.q.row + column)
                         : uint4{0, 0, 0, 0};
    }
  }
  __device__ __forceinline__ void store(uint32_t sQ) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int i = c * Config::THREADS + threadIdx.x;
      if (!WHOLE && i >= ALL) continue;
      store_shared_16(sQ + Layout::offset(i / Layout::CHUNKS, i % Layout::CHUNKS), chunks[c]);
    }
  }
};

// Stores a partial result to the workspace, at index `number`.
template <int OT, class Place>
__device__ __forceinline__ void store_partial(const DecodeParams& p, const Partial<OT>& partial,
                                              int64_t number, const Place& own) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = own.row(h);
    if (row >= p.partial_rows) continue;
    const int64_t at = number * p.partial_rows + row;
    if (own.writes_stats()) p.partial_stats[at] = {partial.top[h], partial.sum[h]};
    float* out = p.partial_out + at * Place::Config::HEAD_DIM_V;
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      *reinterpret_cast<float2*>(out + own.column(n)) = {partial.out.x[0][n][2 * h],
                                                         partial.out.x[0][n][2 * h + 1]};
    }
  }
}

// Combines a key block with its group of key blocks, or stores it as a partial if another split has
// a part of the group. Stores a complete group as a partial if this split lacks a part of the work
// tile. Returns true if the group is complete and this split has the whole work tile.
template <class Config, int OT, class Splits>
__device__ __forceinline__ bool take_key_block(const DecodeParams& p, const Splits& splits,
                                               const DecodeCursor& at, SplitBounds bounds,
                                               const WarpPlace<Config>& own,
                                               const Partial<OT>& key_block, Partial<OT>& group) {
  const int group_begin = at.group_begin();
  const int group_end = at.group_end();
  const bool owns_tile = bounds.begin <= at.tile_begin() && at.tile_end() <= bounds.end;
  if (!owns_tile && (group_begin < bounds.begin || bounds.end < group_end)) {
    store_partial(p, key_block, splits.key_block_partial(p, at) + at.key_block % GROUP_BLOCKS, own);
    return false;
  }
  group.combine(key_block);
  if (at.position + 1 < group_end) return false;
  if (owns_tile) return true;
  store_partial(p, group, splits.group_partial(p, at, blockIdx.x), own);
  group.clear();
  return false;
}

// Writes out and lse of a complete work tile.
template <int OT, class Place>
__device__ __forceinline__ void store_result(const DecodeParams& p, const Partial<OT>& all,
                                             const DecodeCursor& at, const Place& own) {
  using Config = typename Place::Config;
  const int head = at.head;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = at.row0(p) + own.row(h);
    if (row >= at.extent.rows(p)) continue;
    const int query = divide(row, p.by_group);
    const int head_in_group = row - query * p.group;
    const RowEnd end(p, head * p.group + head_in_group, all.top[h], all.sum[h]);
    if (own.writes_stats()) {
      p.lse[lse_begin(p, at.batch, head * p.group + head_in_group, at.extent.q0) + query] = end.lse;
    }
    uint16_t* out =
        head_begin(p.out, at.batch, head, head_in_group) + (at.extent.q0 + query) * p.out.row;
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const int column = own.column(n);
      if (column >= p.head_dim_v) continue;
      *reinterpret_cast<uint32_t*>(out + column) =
          pack<typename Config::Target, typename Config::T>(
              finish_out(all.out.x[0][n][2 * h], end.inverse),
              finish_out(all.out.x[0][n][2 * h + 1], end.inverse));
    }
  }
}

// Fills packed rows that belong to no sequence and that no other kernel writes: out with zeros, lse
// with -inf.
template <class Config>
__device__ __forceinline__ void fill_uncovered(const DecodeParams& p) {
  for (int number = blockIdx.x; number < p.batch; number += gridDim.x) {
    const int* ends = p.packing.cu_seqlens_q;
    if (!DocumentRows(ends, number, p.batch, p.total_q, p.seqlen_q).uncovered) continue;
    for_uncovered_rows<Config::THREADS>(
        ends, number, p.batch, p.total_q, p.seqlen_q, 0, 1, [&](int row) {
          for (int head = 0; head < p.num_heads_kv * p.group; ++head) {
            const int head_kv = divide(head, p.by_group);
            zero_row<2>(p.out, head_kv, head - head_kv * p.group, row, p.head_dim_v);
            if (threadIdx.x % ROW_LANES == 0) p.lse[lse_begin(p, 0, head, 0) + row] = -INFINITY;
          }
        });
  }
}

}  // namespace flash_dist

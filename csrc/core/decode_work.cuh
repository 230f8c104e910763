// Finds the key blocks that a thread block computes: its split of the work.
//
// A work tile is block_rows rows of one kv head of one batch entry, together with the key blocks
// visible to any of these rows. The key blocks of all work tiles are numbered consecutively, tile
// after tile, and cut into equal splits (stream-K), one per thread block or pair of blocks. The
// host need not know the lengths of the sequences.
//
// If a work tile lies within one split, that split computes its final result. Otherwise each split
// stores partials of its part of the tile: one per complete group, and one per key block of a group
// that splits share. core/decode_combine.h combines the partials.
//
// Grain names the kind of piece that is never cut: a key block, a group or a work tile. Such a
// piece belongs to the split that contains its first key block. Splits of larger pieces differ more
// in length, but that may cost less than storing and combining more partials.
#pragma once

#include <type_traits>

#include "core/combine.cuh"
#include "core/decode.h"
#include "core/params.h"
#include "core/schedule.cuh"
#include "core/scores.cuh"
#include "core/sequence.cuh"
#include "native/entry.h"

namespace flash_dist {

// The keys of a batch entry, counted from the first key after the left padding. For packed
// sequences leftpad is the row of the sequence's first key.
struct CacheKeys {
  int seqlen, leftpad;

  __device__ __forceinline__ CacheKeys(const CacheParams& p, int batch, int sequences) {
    if (p.cu_seqlens_k != nullptr) {
      const DocumentRows rows(p.cu_seqlens_k, batch, sequences, p.page, p.capacity);
      seqlen = rows.length;
      leftpad = rows.begin;
      return;
    }
    int end = p.capacity;
    if (p.cache_seqlens != nullptr) {
      end = min(max(p.cache_seqlens[batch], 0), p.capacity);
      end = min(end + p.seqlen_new, p.capacity);
    }
    leftpad = p.cache_leftpad == nullptr ? 0 : min(max(p.cache_leftpad[batch], 0), end);
    seqlen = end - leftpad;
  }
};

// Location of a key in the cache: the cache entry, and the row in this entry.
struct CachePlace {
  int entry, row;

  // Locates a key of a batch entry. key: index from the start of the batch entry's cache, less than
  // the capacity.
  __device__ __forceinline__ CachePlace(const CacheParams& p, int batch, int key) {
    if (p.block_table != nullptr) {
      const int page = divide(key, p.by_page);
      entry = p.block_table[batch * p.table_row + page];
      row = key - page * p.page;
    } else {
      entry = p.cache_batch_idx == nullptr ? batch : p.cache_batch_idx[batch];
      row = key;
    }
    entry = min(max(entry, 0), p.entries - 1);
  }
};

// A tile of rows of a batch entry, for every kv head. place: the tile's index in the order of
// computation, below row_tiles. A batch entry with fewer tiles uses the lowest indices.
struct RowTile {
  int batch, place;

  // Returns the row tile with index `number`, if every batch entry counts as row_tiles tiles.
  __device__ __forceinline__ static RowTile at(const DecodeParams& p, int number) {
    const int batch = divide(number, p.by_tiles);
    return {batch, number - batch * p.row_tiles};
  }
  __device__ __forceinline__ void advance(const DecodeParams& p) {
    if (++place == p.row_tiles) ++batch, place = 0;
  }
};

// The key blocks [first, end) of a row tile. Without tiles_differ, every row tile has the key
// blocks visible to any query of the sequence. The result has the same bits: a key block without a
// visible key for the tile's rows changes nothing.
struct DecodeExtent {
  int q0, seqlen_q;                // first query and number of queries of the batch entry
  int tiles;                       // number of row tiles of the batch entry; 0: nothing to compute
  int shift;                       // query i is on the diagonal at key i + shift
  int leftpad;                     // see CacheKeys
  int visible_begin, visible_end;  // keys visible to any row
  int first, end;

  DecodeExtent() = default;
  __device__ __forceinline__ DecodeExtent(const DecodeParams& p, RowTile own)
      : q0(0), seqlen_q(p.seqlen_q), tiles(p.row_tiles) {
    const CacheKeys keys(p.cache, own.batch, p.batch);
    leftpad = keys.leftpad;
    if (p.packing.cu_seqlens_q != nullptr) {
      const DocumentRows queries(p.packing.cu_seqlens_q, own.batch, p.batch, p.total_q, p.seqlen_q);
      q0 = queries.begin;
      seqlen_q = queries.length;
      const bool left_out = p.few_alone && !is_few_queries(seqlen_q, keys.seqlen);
      tiles = left_out ? 0 : static_cast<unsigned>(rows(p) + p.block_rows - 1) / p.block_rows;
    }
    shift = p.bottom_right ? keys.seqlen - seqlen_q : 0;
    int query = 0, last = seqlen_q - 1;
    if (p.tiles_differ) {
      const int row = tile_at(p, own.place) * p.block_rows;
      query = divide(max(row, 0), p.by_group);
      last = divide(max(row + min(p.block_rows, rows(p) - row) - 1, 0), p.by_group);
    }
    const auto among = [&](int key) { return min(max(key, 0), keys.seqlen); };
    visible_begin = p.left >= UNBOUNDED ? 0 : among(shift + query - p.left);
    visible_end = p.right >= UNBOUNDED ? keys.seqlen : among(shift + last + p.right + 1);
    first = visible_begin / KEY_BLOCK;
    end = max((visible_end + KEY_BLOCK - 1) / KEY_BLOCK,
              first + 1);  // a tile without keys has one empty key block
  }
  // Returns the row tile at index `place` of the order of computation. With tiles_differ, the order
  // alternates between the first and the last tiles. Later queries may attend to more keys, so each
  // split gets long and short tiles.
  __device__ __forceinline__ int tile_at(const DecodeParams& p, int place) const {
    return !p.tiles_differ ? place : place % 2 == 0 ? place / 2 : tiles - 1 - place / 2;
  }
  __device__ __forceinline__ int key_blocks() const { return end - first; }
  __device__ __forceinline__ int rows(const DecodeParams& p) const { return p.group * seqlen_q; }
};

// Returns the number of groups of GROUP key blocks in the extent of a row tile.
template <int GROUP>
__device__ __forceinline__ int count_groups(const DecodeExtent& extent) {
  return (extent.end - 1) / GROUP + 1 - extent.first / GROUP;
}

// The lse of a row, and the factor that normalizes its out.
struct RowEnd {
  float lse, inverse;

  __device__ __forceinline__ RowEnd(const DecodeParams& p, int head, float top, float sum)
      : lse(finish_lse(top, sum)), inverse(finish_inverse(sum)) {
    if (p.sinks != nullptr) join_sink(p.sinks[head], lse, inverse);
  }
};

// A position in the numbering of the key blocks of all work tiles. The kv heads of a row tile are
// adjacent, so that all heads of a page are read at about the same time.
struct DecodeCursor {
  int batch, place, head, key_block;
  DecodeExtent extent;
  int position;  // index among all key blocks

  DecodeCursor() = default;
  // Makes the cursor at index position_, which must be in row tile `own`. base: the index of the
  // tile's first key block, for its first kv head.
  __device__ __forceinline__ DecodeCursor(const DecodeParams& p, RowTile own, int base,
                                          int position_)
      : batch(own.batch), place(own.place), extent(p, own), position(position_) {
    const auto inside = static_cast<unsigned>(position - base);
    head = static_cast<int>(inside / static_cast<unsigned>(extent.key_blocks()));
    key_block = extent.first + static_cast<int>(inside) - head * extent.key_blocks();
  }
  __device__ __forceinline__ void advance(const DecodeParams& p) {
    ++position;
    if (++key_block < extent.end) return;
    if (++head == p.num_heads_kv) {
      head = 0;
      find_next_tile(p);
    }
    key_block = extent.first;
  }

  // Returns the first row of the row tile at the cursor.
  __device__ __forceinline__ int row0(const DecodeParams& p) const {
    return extent.tile_at(p, place) * p.block_rows;
  }

  __device__ __forceinline__ int tile_begin() const {
    return position - (key_block - extent.first);
  }
  __device__ __forceinline__ int tile_end() const { return tile_begin() + extent.key_blocks(); }
  // group_begin, group_end: the index of the first key block of the cursor's group, and the index
  // after its last one. Groups have GROUP key blocks.
  template <int GROUP = GROUP_BLOCKS>
  __device__ __forceinline__ int group_begin() const {
    return position - (key_block - max(key_block / GROUP * GROUP, extent.first));
  }
  template <int GROUP = GROUP_BLOCKS>
  __device__ __forceinline__ int group_end() const {
    return position + (min((key_block / GROUP + 1) * GROUP, extent.end) - key_block);
  }
  // Returns the index at which the last group of the tile begins.
  template <int GROUP = GROUP_BLOCKS>
  __device__ __forceinline__ int last_group() const {
    return tile_end() - (extent.end - max((extent.end - 1) / GROUP * GROUP, extent.first));
  }
  // Returns the index of the first key block of the last softmax over the tile's key blocks [begin,
  // end). The result of this softmax is the last partial of these key blocks.
  template <int SOFTMAX_BLOCKS>
  __device__ __forceinline__ int last_partial(int begin, int end) const {
    return position + (max((end - 1) / SOFTMAX_BLOCKS * SOFTMAX_BLOCKS, begin) - key_block);
  }

 private:
  __device__ __forceinline__ void find_next_tile(const DecodeParams& p) {
    do {
      if (++place >= extent.tiles) {
        place = 0;
        if (++batch == p.batch) return;
      }
      extent = DecodeExtent(p, {batch, place});
    } while (extent.tiles == 0);
  }
};

// Stores a cursor, the same in all lanes of a warp, to the warp's variable in shared memory.
__device__ __forceinline__ void set_cursor(DecodeCursor& kept, const DecodeCursor& at) {
  __syncwarp();  // all lanes have read the previous cursor
  if (threadIdx.x % 32 == 0) kept = at;
  __syncwarp();
}

// Advances a cursor. KEPT: the cursor is in shared memory, one per warp.
template <bool KEPT>
__device__ __forceinline__ void advance_cursor(const DecodeParams& p, DecodeCursor& at) {
  if constexpr (KEPT) {
    DecodeCursor next = at;
    next.advance(p);
    set_cursor(at, next);
  } else {
    at.advance(p);
  }
}

// The key blocks [begin, end) of a split, by index.
struct SplitBounds {
  int begin, end;

  __device__ __forceinline__ bool owns_tile(const DecodeCursor& at) const {
    return begin <= at.tile_begin() && at.tile_end() <= end;
  }
  __device__ __forceinline__ bool cuts_group(const DecodeCursor& at) const {
    return at.group_begin() < begin || end < at.group_end();
  }
};

// Returns the sum of `number` over this lane and all lanes before it.
__device__ __forceinline__ int sum_until(int number) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, number, i);
    if (lane >= i) number += other;
  }
  return number;
}

// The pieces that splits never cut.
enum class Grain { KEY_BLOCK, GROUP, TILE };

// The splits of all key blocks. If splits cannot have equal lengths, the first splits have one key
// block more. All THREADS threads of a block construct this object together. SOFTMAX_BLOCKS: number
// of key blocks per softmax, either 1 or as many as a group has.
template <int THREADS, int SOFTMAX_BLOCKS = 1>
struct DecodeSplits {
  static constexpr int OF_SOFTMAX = SOFTMAX_BLOCKS;
  static constexpr int GROUP = group_blocks(SOFTMAX_BLOCKS);  // number of key blocks of a group
  static constexpr int GROUP_PARTIALS = GROUP / SOFTMAX_BLOCKS;
  static constexpr int RESTING = resting_partials(SOFTMAX_BLOCKS);
  struct Lengths {
    int2 warp_lengths[THREADS / 32];
  };
  struct Nothing {};
  struct Smem : std::conditional_t<(SOFTMAX_BLOCKS > 1), Lengths, Nothing> {
    int warp_key_blocks[THREADS / 32];
    RowTile tile;
    int base;
  };
  int total;
  Grain grain;

  __device__ __forceinline__ DecodeSplits(const DecodeParams& p, Smem& smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mine_ = 0;
    RowTile own = RowTile::at(p, begin_of(p));
    for (int i = begin_of(p); i < end_of(p); ++i, own.advance(p)) mine_ += key_blocks_of(p, own);
    before_ = sum_until(mine_);
    if (lane == 31) smem.warp_key_blocks[warp] = before_;
    __syncthreads();
    total = 0;
    before_ -= mine_;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
      if (w < warp) before_ += smem.warp_key_blocks[w];
      total += smem.warp_key_blocks[w];
    }
    each_ = static_cast<unsigned>(total) / static_cast<unsigned>(p.splits);
    more_ = total - each_ * p.splits;
    bool whole_tiles = false;
    if constexpr (SOFTMAX_BLOCKS > 1) whole_tiles = prefers_tiles(find_lengths(p, smem));
    grain = choose_grain(p, total > p.max_key_blocks || whole_tiles);
  }

  __device__ __forceinline__ int begin(int split) const {
    return split * each_ + min(split, more_);
  }
  // Returns the split that contains a key block.
  __device__ __forceinline__ int owner(int position) const {
    const int longer = more_ * (each_ + 1);  // number of key blocks in the longer splits
    if (position < longer) return static_cast<unsigned>(position) / (each_ + 1u);
    return more_ + static_cast<unsigned>(position - longer) / static_cast<unsigned>(each_);
  }

  // Returns the cursor at index `position`, which is below total. All threads must call this, after
  // they have read any earlier result.
  __device__ __forceinline__ DecodeCursor find(const DecodeParams& p, Smem& smem,
                                               int position) const {
    if (before_ <= position && position < before_ + mine_) {
      RowTile own = RowTile::at(p, begin_of(p));
      int base = before_;
      for (int key_blocks; (key_blocks = key_blocks_of(p, own)) <= position - base; own.advance(p))
        base += key_blocks;
      smem.tile = own;
      smem.base = base;
    }
    __syncthreads();
    return DecodeCursor(p, smem.tile, smem.base, position);
  }
  // Returns the cursor at the first key block of work tile `number`. Every batch entry counts as
  // row_tiles row tiles. If the entry does not have this tile, the cursor has place >=
  // extent.tiles. All threads must call this, as with find().
  __device__ __forceinline__ DecodeCursor find_tile(const DecodeParams& p, Smem& smem,
                                                    int number) const {
    const int tile = number / p.num_heads_kv;
    if (begin_of(p) <= tile && tile < end_of(p)) {
      RowTile own = RowTile::at(p, begin_of(p));
      int base = before_;
      for (int i = begin_of(p); i < tile; ++i, own.advance(p)) base += key_blocks_of(p, own);
      smem.tile = own;
      smem.base = base;
    }
    __syncthreads();
    const int key_blocks = DecodeExtent(p, smem.tile).key_blocks();
    const int head = number - tile * p.num_heads_kv;
    return DecodeCursor(p, smem.tile, smem.base, smem.base + head * key_blocks);
  }

  // Returns the index at which the group or work tile of the cursor begins, if the cursor is at its
  // first key block; otherwise the index at which the group or work tile ends.
  __device__ __forceinline__ int whole_from(const DecodeCursor& at) const {
    const bool is_tile = grain == Grain::TILE;
    const int first = is_tile ? at.tile_begin() : at.group_begin<GROUP>();
    return first == at.position ? first : is_tile ? at.tile_end() : at.group_end<GROUP>();
  }

  // Finds the key blocks [begin, end) of a split, and the cursor at the first one. Returns false if
  // the split has none. A group or work tile that is not cut belongs to the split in which it
  // begins.
  __device__ __forceinline__ bool find_split(const DecodeParams& p, Smem& smem, int split,
                                             DecodeCursor& at, int& begin, int& end) const {
    begin = this->begin(split);
    end = this->begin(split + 1);
    if (begin == end) return false;
    const bool cuts_anywhere = SOFTMAX_BLOCKS == 1 && grain == Grain::KEY_BLOCK;
    bool is_end = !cuts_anywhere && end < total;
    // NOTE: a loop, so that all calls of find() share one copy of its code, which is large. Each
    // block runs find_split() once, so most of its time goes to fetching instructions.
#pragma unroll 1
    for (int position = is_end ? end : begin;; __syncthreads()) {
      at = find(p, smem, position);
      const int whole = cuts_anywhere ? position : whole_from(at);
      if (is_end) {
        is_end = false;
        end = whole;
        position = begin;
      } else if (whole == position) {
        return true;
      } else {
        position = begin = whole;
        if (begin >= end) return false;
      }
    }
  }

  // Returns the index of the first partial of a group that splits share. The partials of its other
  // key blocks follow.
  __device__ __forceinline__ int64_t key_block_partial(const DecodeParams& p,
                                                       const DecodeCursor& at) const {
    return int64_t{p.splits} * RESTING + int64_t{owner(at.group_begin<GROUP>())} * GROUP_PARTIALS;
  }
  // Tells if the group of the cursor, which begins in `split`, continues in a later split.
  __device__ __forceinline__ bool is_cut(const DecodeCursor& at, int split) const {
    const int first = at.key_block - (at.position - at.group_begin<GROUP>());
    const int last = at.key_block + (at.group_end<GROUP>() - at.position);
    return grain == Grain::KEY_BLOCK &&
           at.last_partial<SOFTMAX_BLOCKS>(first, last) >= begin(split + 1);
  }
  // Returns the index of the partial of a complete group in `split`. If the work tile began in an
  // earlier split, its groups use the split's partials from the first one upwards. If the work tile
  // begins in this split and continues in a later one, its groups use them from the last one
  // downwards. Either work tile may be cut within a group.
  __device__ __forceinline__ int64_t group_partial(const DecodeParams& p, const DecodeCursor& at,
                                                   int split) const {
    const int first = begin(split), end = begin(split + 1);
    const int places = (each_ + 1) / GROUP + 4;
    const int group = at.key_block / GROUP;
    const auto group_at = [&](int position) {  // number of the tile's group at index `position`
      return (at.key_block + (position - at.position)) / GROUP;
    };
    const int place =
        at.tile_begin() < first ? group - group_at(first) : places - 1 - (group_at(end) - group);
    constexpr int BEFORE = RESTING + GROUP_PARTIALS;  // other partials per split, stored first
    return int64_t{p.splits} * BEFORE + int64_t{split} * places + place;
  }

 private:
  __device__ __forceinline__ Grain choose_grain(const DecodeParams& p, bool whole_tiles) const {
    return whole_tiles ? Grain::TILE : prefers_groups(p) ? Grain::GROUP : Grain::KEY_BLOCK;
  }
  // Returns the number of key blocks of the longest split, rounded up to a multiple of `step`.
  __device__ __forceinline__ int64_t longest(int step) const {
    const int64_t key_blocks = int64_t{each_} + (more_ > 0);
    return (key_blocks + step - 1) / step * step;
  }
  // Tells if the longest split costs no more with complete groups than with cut groups. With cut
  // groups, a split may also store a partial per key block of a group. Writing and reading such a
  // partial costs partial_rows / 64 times as much as reading the keys and values of the key block.
  __device__ __forceinline__ bool prefers_groups(const DecodeParams& p) const {
    if constexpr (SOFTMAX_BLOCKS > 1) {
      return longest(GROUP) == longest(SOFTMAX_BLOCKS);
    } else {
      const int key_blocks = each_ + (more_ > 0);
      const int missing = (GROUP - key_blocks % GROUP) % GROUP;
      return missing * 64 <= min(key_blocks, GROUP) * p.partial_rows;
    }
  }
  // Returns the numbers of key blocks of the shortest and of the longest work tile. All threads
  // must call this.
  __device__ __forceinline__ int2 find_lengths(const DecodeParams& p, Smem& smem) const {
    int2 lengths = lengths_of(p);
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      lengths.x = min(lengths.x, __shfl_xor_sync(0xffffffffu, lengths.x, i));
      lengths.y = max(lengths.y, __shfl_xor_sync(0xffffffffu, lengths.y, i));
    }
    if (threadIdx.x % 32 == 0) smem.warp_lengths[threadIdx.x / 32] = lengths;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
      lengths.x = min(lengths.x, smem.warp_lengths[w].x);
      lengths.y = max(lengths.y, smem.warp_lengths[w].y);
    }
    return lengths;
  }
  // Returns the least and the greatest number of key blocks among this thread's row tiles.
  __device__ __forceinline__ static int2 lengths_of(const DecodeParams& p) {
    int2 lengths{INT32_MAX, 0};
    RowTile own = RowTile::at(p, begin_of(p));
    for (int i = begin_of(p); i < end_of(p); ++i, own.advance(p)) {
      const DecodeExtent extent(p, own);
      if (own.place >= extent.tiles) continue;
      lengths.x = min(lengths.x, extent.key_blocks());
      lengths.y = max(lengths.y, extent.key_blocks());
    }
    return lengths;
  }
  // Tells if the longest split has at most a tenth more key blocks with complete work tiles than
  // with cut ones, whose partials must be stored and combined. lengths: the result of
  // find_lengths().
  __device__ __forceinline__ bool prefers_tiles(int2 lengths) const {
    if (total == 0) return false;
    const int64_t key_blocks = int64_t{each_} + (more_ > 0);
    // A split has the work tiles that begin in it. If all work tiles are equally long, these are at
    // most key_blocks / lengths.y tiles, rounded up.
    const int64_t in_tiles = lengths.x == lengths.y
                                 ? (key_blocks + lengths.y - 1) / lengths.y * lengths.y
                                 : key_blocks + lengths.y;
    return 10 * in_tiles <= 11 * longest(SOFTMAX_BLOCKS);
  }
  // begin_of, end_of: the row tiles [begin, end) that this thread counts.
  __device__ __forceinline__ static int begin_of(const DecodeParams& p) {
    return min(static_cast<int>(threadIdx.x) * tiles_of_thread(p), p.batch * p.row_tiles);
  }
  __device__ __forceinline__ static int end_of(const DecodeParams& p) {
    return min(begin_of(p) + tiles_of_thread(p), p.batch * p.row_tiles);
  }
  __device__ __forceinline__ static int tiles_of_thread(const DecodeParams& p) {
    return (p.batch * p.row_tiles + THREADS - 1) / THREADS;
  }
  // Returns the number of key blocks of a row tile, over all kv heads.
  __device__ __forceinline__ static int key_blocks_of(const DecodeParams& p, RowTile own) {
    const DecodeExtent extent(p, own);
    return own.place < extent.tiles ? extent.key_blocks() * p.num_heads_kv : 0;
  }

  int before_, mine_;  // number of key blocks before, and in, this thread's row tiles
  int each_, more_;
};

inline DecodeParams with_divisors(DecodeParams p) {
  p.by_group = make_divisor(p.group);
  p.by_tiles = make_divisor(p.row_tiles);
  p.cache.by_page = make_divisor(p.cache.page);
  return p;
}

inline cudaError_t launch_decode_blocks(const KernelEntry& entry, const void* params,
                                        cudaStream_t stream) {
  const DecodeParams p = with_divisors(*static_cast<const DecodeParams*>(params));
  return launch_1d(entry, &p, p.splits, stream);
}

template <class Config>
constexpr auto launch_decode = &launch_decode_blocks;

}  // namespace flash_dist

// Arguments of the kernels that read keys and values from a cache, and the rules that they share:
// how keys are split, and where partial results are stored.
//
// The keys of a sequence are split into key blocks of KEY_BLOCK keys, starting at its first key,
// and key blocks into groups of GROUP_BLOCKS. Each key block has its own softmax. core/combine.cuh
// combines the key blocks of a group, then the groups of a sequence, both in the order of the keys.
// Therefore the bits of a sequence's result depend only on its queries, keys and values: not on the
// other sequences of the batch, on the pages of its cache or on the number of multiprocessors.
//
// The kernel for latent keys with many query heads lacks the registers for O of a group and O of a
// key block at once. Its groups have LATENT_SOFTMAX_BLOCKS key blocks, one softmax per group. O of
// previous groups is kept in global memory. Shorter groups would load and store that O more often.
// Longer groups would leave multiprocessors idle if there are few work tiles.
#pragma once

#include "core/params.h"

namespace flash_dist {

constexpr int KEY_BLOCK = 128;
constexpr int GROUP_BLOCKS = 8;
// Key blocks per softmax, and per group, of latent keys in tiles of 64 rows.
constexpr int LATENT_SOFTMAX_BLOCKS = 16;
constexpr int MOST_FEW_TILES = 64;  // kernels with stored P support at most this many work tiles
constexpr int PAGE_STEP = 16;       // keys per contiguous run: page sizes are multiples of this

// Locates the keys of each batch entry: rows [0, page) of cache entries. With block_table a cache
// entry is a page. Without it, a cache entry holds all keys of a batch entry.
//
// NOTE: the contents of the arrays are unchecked. Only core/decode_work.cuh reads them, and it
// clamps them to the tensors.
struct CacheParams {
  View k, v;                    // [entries, page, num_heads_kv, 1, columns]; v.data null: v is in k
  const int* cache_seqlens;     // [batch] number of keys before the new ones; null: capacity
  const int* cache_batch_idx;   // [batch] cache entry of each batch entry; null: same index
  const int* cache_leftpad;     // [batch] keys to skip at the start of each sequence; null: none
  const int* block_table;       // [batch, capacity / page] cache entries; null: not paged
  const int* cu_seqlens_k;      // [batch + 1] sequence starts in cache entry 0; null: not packed
  int64_t table_row;            // row stride of block_table
  int entries, page, capacity;  // capacity: maximum number of keys per sequence
  int seqlen_new;               // new keys per sequence, which follow the cache_seqlens keys
  Divisor by_page;              // filled in at the launch
};

struct DecodeParams {
  View q;      // [batch, seqlen_q, num_heads_kv, group, head_dim]
  View out;    // like q, but head_dim_v columns
  float* lse;  // [batch, num_heads_q, seqlen_q], packed: [num_heads_q, total_q]; natural logarithm
  CacheParams cache;
  Packing packing;                           // rows of q, out and lse; only cu_seqlens_q is used
  int batch, seqlen_q, num_heads_kv, group;  // packed: longest seqlen_q
  int total_q;                               // packed: number of tokens
  int head_dim, head_dim_v;                  // columns without padding
  int left, right;                           // sides of the window; UNBOUNDED: no limit
  int bottom_right;                          // 1: window aligned bottom right; 0: top left
  int few_alone;                             // 1: compute only sequences with is_few_queries()
  float softmax_scale;
  ScoreParams scores;
  const float* sinks;  // see FwdParams::sinks
  // How the work is split. The host code fills in these fields.
  int block_rows;      // rows of a work tile; row r is query r / group, head r % group
  int row_tiles;       // ceil(group * seqlen_q / block_rows): maximum number of tiles per kv head
  int partial_rows;    // min(group * seqlen_q, block_rows): rows of a partial result
  int splits;          // number of splits of all key blocks, each for one or two thread blocks
  int tiles_differ;    // 1: a tile has the key blocks visible to its rows; 0: to any query
  int columns;         // compiled columns of a partial result
  int max_key_blocks;  // with more key blocks no work tile is split: partial_out would be too small
  float* partial_out;  // [partials, partial_rows, columns]
  float2* partial_stats;       // [partials, partial_rows] top and sum, core/combine.cuh
  int combine_blocks;          // blocks per work tile in the combine kernel
  Divisor by_group, by_tiles;  // filled in at the launch
};

// Arguments for latent keys in tiles of 64 rows. If there are few work tiles, P of all of them may
// be stored, in tiles of 64 rows and 64 keys (sm90/mla/values.cuh).
struct LatentParams : DecodeParams {
  // P is stored only if all work tiles together have at most this many key blocks; 0: never.
  int few_key_blocks;
  uint16_t* weights;   // [2 * few_key_blocks] tiles of P, as panels of 64 columns
  float2* tile_stats;  // [2 * few_key_blocks, 64] top and sum of each row of P's tiles
};

// Returns the maximum number of rows per kv head, over the sequences that the call computes.
inline int most_rows(const DecodeParams& p) {
  const int few = p.seqlen_q < MORE_QUERIES ? p.seqlen_q : MORE_QUERIES;
  return p.group * (p.few_alone ? few : p.seqlen_q);
}

// Returns the number of key blocks in a group if one softmax covers softmax_blocks of them.
constexpr int group_blocks(int softmax_blocks) {
  return softmax_blocks > GROUP_BLOCKS ? softmax_blocks : GROUP_BLOCKS;
}

// Returns how many partials per split hold O of the work tile while a group of key blocks is
// computed: 2 or 0. One is too small: warps also store rows that do not exist (sm90/mla/rest.cuh).
constexpr int resting_partials(int softmax_blocks) { return softmax_blocks > 1 ? 2 : 0; }

// Returns the number of partials that a call needs if all sequences together have `key_blocks` key
// blocks.
constexpr int64_t decode_partials(int64_t key_blocks, int64_t splits, int softmax_blocks = 1) {
  // Each split has partials for O of its work tile, for the key blocks of one group that splits
  // share, and for its complete groups.
  const int group = group_blocks(softmax_blocks);
  return splits * (resting_partials(softmax_blocks) + group / softmax_blocks) + key_blocks / group +
         5 * splits;
}

// Arguments of the kernel that appends new keys and values to a cache and rotates keys and queries.
struct AppendParams {
  CacheParams cache;
  View k, v;        // [batch, seqlen_new, num_heads_kv, 1, columns]
  View q, rotated;  // [batch, seqlen_q, num_heads_q, 1, head_dim]; data null if absent
  const void* cos;  // [rotary_rows, rotary_dim / 2] in the dtype of q; null: no rotary embedding
  const void* sin;
  int rotary_rows, rotary_dim;
  int interleaved;  // 1: a pair is two adjacent columns; 0: columns rotary_dim / 2 apart
  int advances;     // 1: query i has position cache_seqlens + i; 0: all have cache_seqlens
  int batch, seqlen_q, num_heads_kv, num_heads_q;
  int head_dim, head_dim_v;
};

}  // namespace flash_dist

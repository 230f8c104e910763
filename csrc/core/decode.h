// Arguments of the kernels that read keys and values from a cache, and what they all agree on: how
// keys are cut up, and where partial results are stored.
//
// The keys of a sequence are cut into key blocks of KEY_BLOCK keys, counted from its first key, and
// key blocks into groups of GROUP_BLOCKS. Each key block has a softmax of its own. core/combine.cuh
// combines the key blocks of a group, and then the groups of a sequence, both in the order of the
// keys. Therefore nothing else decides a bit of the result: not the batch, the place of the
// sequence in it, the pages of its cache or the number of multiprocessors.
//
// The kernel for many heads of latent keys has no registers for O of a group beside O of a key
// block. It computes a whole group in one softmax. Softmaxes of half a group made more splits and
// more partials: on an H200 64 and 128 heads took a tenth to a quarter longer, and 4096 keys of one
// user a fifth less.
#pragma once

#include "core/params.h"

namespace flash_dist {

constexpr int KEY_BLOCK = 128;
constexpr int GROUP_BLOCKS = 8;
constexpr int LATENT_SOFTMAX_BLOCKS = 8;  // of latent keys, in tiles of 64 rows
constexpr int PAGE_STEP = 16;             // keys that lie together in every cache

// Where the keys of each batch entry lie: rows [0, page) of entries of a cache. An entry is a page,
// or without block_table all that a batch entry may hold. NOTE: the contents of the arrays are not
// checked. Only core/decode_work.cuh reads them, and clamps them to the tensors.
struct CacheParams {
  View k, v;                    // [entries, page, num_heads_kv, 1, columns]; v.data null: v is in k
  const int* cache_seqlens;     // [batch] keys of each sequence before new ones; null: capacity
  const int* cache_batch_idx;   // [batch] entry of each; null: its own number
  const int* cache_leftpad;     // [batch] keys to leave out before the first; null: none
  const int* block_table;       // [batch, capacity / page] entries; null: not in pages
  const int* cu_seqlens_k;      // [batch + 1] where each begins in the one entry; null: not packed
  int64_t table_row;            // stride of block_table
  int entries, page, capacity;  // capacity: keys that a sequence may have
  int seqlen_new;               // keys that were, or are to be, appended behind cache_seqlens
  Divisor by_page;              // filled in at the launch
};

struct DecodeParams {
  View q;      // [batch, seqlen_q, num_heads_kv, group, head_dim]
  View out;    // the same with head_dim_v
  float* lse;  // [batch, num_heads_q, seqlen_q], packed: [num_heads_q, total_q]; natural logarithm
  CacheParams cache;
  Packing packing;                           // of q, out and lse: cu_seqlens_q alone
  int batch, seqlen_q, num_heads_kv, group;  // packed: seqlen_q is the longest
  int total_q;                               // packed: tokens
  int head_dim, head_dim_v;                  // columns that exist
  int left, right;                           // window; UNBOUNDED: none
  int bottom_right;                          // alignment of the window, else top left
  int few_alone;                             // compute only sequences of few queries on many keys
  float softmax_scale;
  ScoreParams scores;
  const float* sinks;  // as FwdParams::sinks
  // Filled in by the host code: how the work is split.
  int block_rows;      // of a work tile: row r is query r / group of head r % group of a kv head
  int row_tiles;       // ceil(group * seqlen_q / block_rows), the most that a sequence has
  int partial_rows;    // min(group * seqlen_q, block_rows): rows of a partial result
  int splits;          // of the key blocks of all sequences, one for each thread block
  int tiles_differ;    // each tile has the key blocks that its rows see, else those of its sequence
  int columns;         // of a partial result: of the compiled size
  int max_key_blocks;  // with more no work tile is cut, as partial results have no room
  float* partial_out;  // [partials, partial_rows, columns]
  float2* partial_stats;       // [partials, partial_rows] top and sum, core/combine.cuh
  int combine_blocks;          // blocks that combine a work tile, each some rows and columns
  Divisor by_group, by_tiles;  // filled in at the launch
};

// The most rows that a kv head of a sequence has.
inline int most_rows(const DecodeParams& p) {
  const int few = p.seqlen_q < MORE_QUERIES ? p.seqlen_q : MORE_QUERIES;
  return p.group * (p.few_alone ? few : p.seqlen_q);
}

// Partials of each split for O of its work tile, which rests in memory while a group is computed.
// Two, as warps also store rows that do not exist (sm90/mla/rest.cuh).
constexpr int resting_partials(int softmax_blocks) { return softmax_blocks > 1 ? 2 : 0; }

// Partials that the call needs if all sequences have `key_blocks` key blocks together.
constexpr int64_t decode_partials(int64_t key_blocks, int64_t splits, int softmax_blocks = 1) {
  // For each split: what rests, the partials of one cut group, and those of its whole groups.
  const int of_group = GROUP_BLOCKS / softmax_blocks;
  return splits * (resting_partials(softmax_blocks) + of_group) + key_blocks / GROUP_BLOCKS +
         5 * splits;
}

// Arguments of the kernel that appends new keys and values to a cache and rotates keys and queries.
struct AppendParams {
  CacheParams cache;
  View k, v;        // [batch, seqlen_new, num_heads_kv, 1, columns]
  View q, rotated;  // [batch, seqlen_q, num_heads_q, 1, head_dim]; data null: none
  const void* cos;  // [rotary_rows, rotary_dim / 2] of the dtype; null: nothing is rotated
  const void* sin;
  int rotary_rows, rotary_dim;
  int interleaved;  // a pair is two neighbours, else its elements are rotary_dim / 2 apart
  int advances;     // query i is at position cache_seqlens + i, else all at cache_seqlens
  int batch, seqlen_q, num_heads_kv, num_heads_q;
  int head_dim, head_dim_v;
};

}  // namespace flash_dist

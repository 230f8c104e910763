// Arguments of the kernels that read keys and values from a cache, and what all of them agree upon:
// how keys are cut up, and where partial results lie.
//
// The keys of a sequence are cut into key blocks of KEY_BLOCK, counted from its first key, and key blocks into
// groups of GROUP_BLOCKS. Each key block has a softmax of its own; core/combine.cuh puts the key blocks of a group
// together, and then the groups of a sequence, both in the order of the keys. Whoever computes a key block
// or a combine, nothing else decides a bit of the result: not the batch, the place of the sequence in
// it, the pages of its cache or the number of multiprocessors.
//
// One kernel has no registers for O of a group beside that of a key block. It walks through several key blocks in
// one softmax: through a part of a group, counted likewise, which may be all of it. To the others a
// part is a key block. Where parts are smaller more blocks have one, and more is written to memory and read
// between them: on an H200 with parts of 512 keys 64 and 128 heads took a tenth to a quarter longer, and
// 4096 keys of one user a fifth less.
#pragma once

#include "core/few_queries.h"
#include "core/params.h"

namespace flash_dist {

constexpr int KEY_BLOCK = 128;
constexpr int GROUP_BLOCKS = 8;
constexpr int LATENT_SOFTMAX_BLOCKS = 8;  // of latent keys, where 64 rows are computed at a time
constexpr int PAGE_STEP = 16;             // keys that lie together in every cache

// Where the keys of each batch entry lie: rows [0, page) of entries of a cache. An entry is a page,
// or without block_table all that a batch entry may hold. NOTE: what the arrays hold nobody has
// checked; core/decode_work.cuh alone reads them, and keeps to the tensors.
struct CacheParams {
  View k, v;                    // [entries, page, num_heads_kv, 1, columns]; v may lie in k
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
  int left, right;                           // of a band; UNBOUNDED: none
  int bottom_right;                          // how it is aligned, else to the top left
  int few_alone;  // whether sequences are left out that are not few queries on many keys
  float softmax_scale;
  ScoreParams scores;
  const float* sinks;  // as FwdParams::sinks
  // Filled in by the host code: how the work is shared out.
  int block_rows;    // of a tile: row r is query r / group of head r % group of a kv head
  int row_tiles;     // ceil(group * seqlen_q / block_rows), the most that a sequence has
  int partial_rows;  // min(group * seqlen_q, block_rows): rows of a partial result
  int splits;        // blocks that share the key blocks of all sequences
  int tiles_differ;  // whether each tile has the key blocks that its rows see, else those of its sequence
  int columns;         // of a partial result: of the compiled size
  int max_key_blocks;  // more key blocks in all, and no sequence is split: partial results have no place
  float* partial_out;          // [partials, partial_rows, columns]
  float2* partial_stats;       // [partials, partial_rows] top and sum, core/combine.cuh
  int combine_blocks;          // blocks that combine a tile, each some of its rows and columns
  Divisor by_group, by_tiles;  // filled in at the launch
};

// Rows of a kv head of a sequence, the most.
inline int most_rows(const DecodeParams& p) {
  const int few = p.seqlen_q < MORE_QUERIES ? p.seqlen_q : MORE_QUERIES;
  return p.group * (p.few_alone ? few : p.seqlen_q);
}

// Records of each share for what it has of a tile, where that rests in memory while it computes a group: two,
// as warps write what they have of rows that do not exist, too (sm90/mla/rest.cuh).
constexpr int resting_partials(int softmax_blocks) { return softmax_blocks > 1 ? 2 : 0; }

// Records that partial results need if all sequences have `key blocks` key blocks together.
constexpr int64_t decode_partials(int64_t key_blocks, int64_t splits, int softmax_blocks = 1) {
  // What rests; parts of groups that are cut, at most one at the end of each share; whole groups of
  // each share.
  const int parts = GROUP_BLOCKS / softmax_blocks;
  return splits * (resting_partials(softmax_blocks) + parts) + key_blocks / GROUP_BLOCKS +
         5 * splits;
}

// Copies new keys and values behind those of a cache, and rotates keys and queries.
struct AppendParams {
  CacheParams cache;
  View k, v;        // [batch, seqlen_new, num_heads_kv, 1, columns]
  View q, rotated;  // [batch, seqlen_q, num_heads_q, 1, head_dim]; data null: none
  const void* cos;  // [rotary_rows, rotary_dim / 2] of the dtype; null: nothing is rotated
  const void* sin;
  int rotary_rows, rotary_dim;
  int interleaved;  // pairs are neighbours, else halves apart
  int advances;     // query i is at position cache_seqlens + i, else all at cache_seqlens
  int batch, seqlen_q, num_heads_kv, num_heads_q;
  int head_dim, head_dim_v;
};

}  // namespace flash_dist

// Kernel arguments: plain structs, filled by the host code, passed by value. Sizes in elements
// unless a name says bytes.
#pragma once

#include <cuda_runtime_api.h>  // int2, int4, for g++ too

#include <cstdint>

#include "core/band.h"

namespace flash_dist {

// Of the elements and of the arithmetic: IEEE32 is fp32 whose products are FFMA.
enum class Dtype : int { FP16 = 0, BF16 = 1, FP32 = 2, IEEE32 = 3 };

constexpr bool is_fp32(Dtype dtype) { return dtype == Dtype::FP32 || dtype == Dtype::IEEE32; }

// A [batch, seqlen, num_heads_kv, group, head_dim] view with a contiguous last axis. A 4-D tensor
// of num_heads_q heads is the view whose head_kv stride is group * head_group stride; k and v have
// one head per group. A packed tensor [tokens, num_heads_kv, group, head_dim] has batch stride 0.
struct View {
  void* data;
  int64_t batch;  // strides
  int64_t row;
  int64_t head_kv;
  int64_t head_group;
};

// Few queries on many keys: the forward of such sequences runs as attention to a cache (core/decode.h),
// since kernels with a block for each query tile would leave multiprocessors idle.
//
// Up to 16 queries leave most of a tile of 128 empty. 64 fill half of one: on an H200 one sequence of
// them on 16384 keys, 16 heads, has 0.53 of the best peer's speed in units and 0.28 tile by tile; of
// eight such sequences, which fill the GPU, units have 0.41.
constexpr int FEW_QUERIES = 16, MANY_KEYS = 1024;
constexpr int MORE_QUERIES = 64, MORE_KEYS = 16384;

// NOTE: depends on the sequence's own lengths only. If it depended on the number of heads or of
// sequences, or on other lengths, the bits of a sequence would depend on its batch.
FLASH_DIST_HOST_DEVICE inline bool is_few_queries(int seqlen_q, int seqlen_k) {
  return seqlen_q <= (seqlen_k >= MORE_KEYS ? MORE_QUERIES : FEW_QUERIES) && seqlen_k >= MANY_KEYS;
}

// What a list entry says about one tile of 64 queries and 64 keys; >= 0: index of its bits.
constexpr int TILE_FULL = -1;
constexpr int TILE_EMPTY = -2;
constexpr int TILE_ROWS = -3;  // as rows say

// Visible tiles in compressed rows: those of line i (64 or 128 queries, or keys) are the entries
// [begin[i], begin[i + 1]), ascending.
struct TileList {
  const int* begin;  // [batches * heads * lines + 1]
  // {tile on the other axis, code of the first 64, code of the second 64, 0}; of lines of 128 keys
  // the last number is 2 * how many later lines have the entry's tile, plus 1 if no earlier one does
  const int4* entries;
  const int2* slots;  // where the two tiles' dS lies, -1: not stored
};

// One mask. The arrays are those of flash_dist/masks/plan.py, with axes [batches, heads, ...] where
// batches and heads are 1 or the call's; plane(batch, head) indexes them.
//
// NOTE: not derived from MaskBand, whose fields it begins with: nvcc then makes other machine code
// of the backward.
struct MaskParams {
  MaskKind kind;
  int left, right;                // BAND
  int bottom_right;               // BAND: shift = seqlen_k - seqlen_q, else 0
  int batch_planes, head_planes;  // plane = batch * batch_planes + query head * head_planes
  int query_tiles, key_tiles;     // ROWS, TILES: ceil(seqlen / 64)
  const int2* key_bounds;         // [batches] first and end key that may be read; null: all
  const int2* rows;               // [plane, query_tiles * 64] first and end key of a query
  const int4* query_ranges;  // [plane, query_tiles] least and greatest rows.x, then those of rows.y
  const int2* key_ranges;    // [plane, key_tiles] first and end query tile that sees the key tile
  const int* key_slots;      // [key_tiles + 1] slots of dS before each key tile, any plane
  TileList by_query[2];      // TILES: lines of 64 and of 128 queries
  TileList by_key[2];        // TILES: lines of 64 and of 128 keys
  const uint2* bits;         // [index, 64 queries] 64 keys each, low word first
};

inline MaskBand band_of(const MaskParams& p) { return {p.kind, p.left, p.right, p.bottom_right}; }

// The largest soft cap c of which c * 2^-23, the error of c * tanh(x) by 1 - 2 / (1 + e^2x), is left to
// 16-bit operands. Larger ones are computed by tanh_near(), and by the general families alone.
constexpr float FAST_CAP = 100.0f;

// What becomes of a score between its scale and the mask, see core/scores.cuh. All zero: nothing.
struct ScoreParams {
  float softcap;       // 0: none
  const float* alibi;  // slopes [num_heads_q] or [batch, num_heads_q]; null: none
  int alibi_batch;     // num_heads_q, 0 where all batch entries share the slopes
  // Filled in at the call:
  int has_score_mod;  // whether there is any of it
  float scale;  // of the scores that the softmax is given: softmax_scale, 1 if they are modified
  float scale_inside;  // the factor of q . k in the modification
  float per_cap;       // 1 / softcap, 0 without one
};

// Numbers that are added to the scores, see core/bias.cuh: [1 or batch, 1 or num_heads_q, seqlen_q,
// seqlen_k] by strides, in elements, 0 along an axis that is broadcast. Not of packed tensors.
struct BiasParams {
  const void* data;  // null: none
  int64_t batch, head, row, key;
  int is_fp32;   // else of the dtype of q
  int in_pairs;  // whether keys 2 * i and 2 * i + 1 are neighbours, at a multiple of their size
  float factor;  // 1 / softmax_scale; filled in at the call
};

// Where the rows of a batch entry lie: null pointers for tensors with a batch axis, whose entries
// all have the full length. NOTE: what the arrays hold nobody has checked; core/sequence.cuh alone
// reads them.
struct Packing {
  const int* cu_seqlens_q;  // [batch + 1]
  const int* cu_seqlens_k;
};

// A division by a number that the host knows, and the order of blocks: see core/schedule.cuh.
struct Divisor {
  int divisor;
  uint32_t multiplier;
  int shift;
};

struct BlockOrder {
  Divisor batch_blocks, width, last_width;
  int whole_batches;
};

struct FwdParams {
  View q;      // [batch, seqlen_q, num_heads_kv, group, head_dim]
  View k, v;   // [batch, seqlen_k, num_heads_kv, 1, head_dim or head_dim_v]
  View out;    // [batch, seqlen_q, num_heads_kv, group, head_dim_v]
  float* lse;  // [batch, num_heads_q, seqlen_q], packed: [num_heads_q, total_q]; natural logarithm
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;  // packed: seqlens are the longest
  int total_q, total_k;                                // packed: tokens
  int head_dim, head_dim_v;                            // columns that exist
  int heads_together;                                  // see core/schedule.cuh
  int leaves_few;  // packed: whether others compute what is few queries on many keys
  float softmax_scale;
  Packing packing;
  MaskParams mask;
  BlockOrder order;  // filled in at the launch, like those below
  Divisor by_num_heads_q, by_group;
  ScoreParams scores;
  const float* sinks;  // [num_heads_q]: a logit of each row that has no value; null: none
  int sm_count;        // multiprocessors of the device
  BiasParams bias;     // given
};

// What a launch of the forward is given.
struct FwdCall {
  FwdParams params;
  unsigned* tickets;  // a counter, 0, for kernels with KernelEntry::takes_tickets, else null
};

struct DeltaParams {
  View out, dout;     // [batch, seqlen_q, num_heads_kv, group, head_dim_v]
  const float* lse;   // as FwdParams::lse
  const float* dlse;  // as lse, or null
  float* lse_log2;    // rows of statistics, core/sequence.cuh; +inf: no key, or padding
  float* delta;       // as lse_log2, times DS_SCALE; 0 for padding
  View dq, dk, dv;    // packed: of which the rows that no document covers are written here
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;
  int total_q, total_k;
  int head_dim, head_dim_v;
  int rows_padded;  // rows of statistics of one head
  Packing packing;
  Divisor by_tiles, by_num_heads_q, by_group;  // filled in at the launch
  const float* sinks;                          // as FwdParams::sinks
  float* dsinks;                               // as lse: of each row, by the sink of its head
  int* dq_turns;                               // as BwdParams::dq_turns, set to 0 here; or null
  int64_t turns;                               // how many numbers these are
};

// One chunk of the backward: units [unit_begin, unit_begin + units) of (batch, kv head), keys of
// tiles [key_begin, key_end) of each batch entry. A unit covers all query heads of its group; in a
// query chunk, some of each split, and seqlen_q and what has rows of queries are those of the chunk.
struct BwdParams {
  View q, k, v, dout;
  View dq, dk, dv;
  const float* lse_log2;  // rows of statistics, [num_heads_q or batch * num_heads_q, rows_padded]
  const float* delta;
  void* ds;           // spilled dS tiles of this chunk, see core/ds_layout.h; null: not stored
  float* dq_accum;    // [units, group, seqlen_q padded to 128, head_dim] while striping, else null
  float* dk_partial;  // [rows as sum_rows says, head_dim] or null
  float* dv_partial;  // the same with head_dim_v
  int64_t ds_tiles_per_head;
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;
  int total_q, total_k;
  int head_dim, head_dim_v;
  int rows_padded;
  int unit_begin, units;
  int key_begin, key_end;  // keys, multiples of the key tile (key_end may be seqlen_k)
  int group_split;
  int dq_first, dq_last;  // first key chunk starts dq_accum, last one writes dq
  int heads_together;     // see core/schedule.cuh
  float softmax_scale;
  Packing packing;
  MaskParams mask;
  BlockOrder order;  // filled in at the launch, like those below
  Divisor by_num_heads_kv, by_members, by_group_split;
  float* normalizers;  // fp32, of each row of statistics: what P is multiplied by; dQ writes them
  // For dQ that blocks sum one after the other in dq_accum: the tile scheduler's counter, then a
  // semaphore for each tile of 64 queries, all 0 at the launch; else null.
  int* dq_turns;
  ScoreParams scores;
  SumRows sum_rows;
  int member_begin, members;  // query heads of each split, counted from its first
  int sums_first, sums_last;  // first query chunk starts dK and dV, last one writes them
  bool batch_invariant;       // nothing may depend on the other sequences of a batch
  bool first_keys_first;      // the order in which blocks add to dQ; not under lists of tiles
  int query_split;            // blocks that share the queries of each split of a group
  int64_t stripe_rows;        // of sums of dK and dV, from those of one such block to the next
  BiasParams bias;            // given
};

// A backward that makes delta, too.
struct WholeParams {
  BwdParams p;
  View out;  // of DeltaParams, as the others
  const float* lse;
  const float* dlse;  // or null
};

// Queries and keys of a block of the kernel that makes the gradient of a bias.
constexpr int BIAS_TILE = 64;

struct BiasGradientParams {
  BwdParams p;
  float* parts;                  // [splits, batches, heads, queries or tiles, keys or tiles]
  int batches, heads;            // of the bias, 1 where it is broadcast
  int visits;                    // batch entries and query heads that share an element
  int splits;                    // blocks that share the visits of a tile
  int query_tiles, key_tiles;    // filled in at the launch
  bool sums_queries, sums_keys;  // along which the bias is broadcast
};

struct ReduceParams {
  struct Sum {
    const float* partial;  // [splits, batch * num_heads_kv, seqlen_k, padded]
    View out;              // [batch, seqlen_k, num_heads_kv, 1, columns]
    int columns, padded;   // that exist, and those of the kernel that made the parts
    float scale;
  };
  Sum sums[2];  // dK, dV
  int splits, batch, seqlen_k, num_heads_kv;
  int total_k;
  Packing packing;
};

}  // namespace flash_dist

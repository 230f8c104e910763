// Kernel arguments: plain structs that the host code fills and passes by value. Sizes are in
// elements unless a name says bytes.
#pragma once

#include <cuda_runtime_api.h>  // int2, int4; also found by g++

#include <cstdint>

#include "core/band.h"

namespace flash_dist {

// The dtype of the elements. FP32 and IEEE32 are both fp32: IEEE32 always multiplies with FFMA, and
// FP32 with TF32 instructions (f32/product.cuh) on targets that have them.
enum class Dtype : int { FP16 = 0, BF16 = 1, FP32 = 2, IEEE32 = 3 };

constexpr bool is_fp32(Dtype dtype) { return dtype == Dtype::FP32 || dtype == Dtype::IEEE32; }

// A [batch, seqlen, num_heads_kv, group, head_dim] view with a contiguous last axis. A 4-D tensor
// of num_heads_q heads is the view whose head_kv stride is group * head_group stride; k and v have
// one head per group. A packed tensor [tokens, num_heads_kv, group, head_dim] has batch stride 0.
struct View {
  void* data;
  int64_t batch;  // strides of the axes before the last
  int64_t row;
  int64_t head_kv;
  int64_t head_group;
};

// Sequences of few queries on many keys run as attention to a cache (core/decode.h). A kernel with
// one block per query tile would leave multiprocessors idle.
//
// Up to 16 queries leave most of a 128-row tile empty, and 64 queries fill half. On an H200, one
// sequence of 64 queries, 16384 keys and 16 heads reaches 0.53 of the fastest baseline's speed when
// split over the keys, and 0.28 with one block per query tile. Eight such sequences, which fill the
// GPU, reach 0.41 when split.
constexpr int FEW_QUERIES = 16, MANY_KEYS = 1024;
constexpr int MORE_QUERIES = 64, MORE_KEYS = 16384;

// NOTE: the result must depend only on this sequence's lengths. Otherwise the bits of a sequence
// would depend on its batch.
FLASH_DIST_HOST_DEVICE inline bool is_few_queries(int seqlen_q, int seqlen_k) {
  return seqlen_q <= (seqlen_k >= MORE_KEYS ? MORE_QUERIES : FEW_QUERIES) && seqlen_k >= MANY_KEYS;
}

// Codes of a tile of 64 queries and 64 keys in TileList::entries. A code >= 0 is the index of the
// tile's bits in MaskParams::bits.
constexpr int TILE_FULL = -1;
constexpr int TILE_EMPTY = -2;
constexpr int TILE_ROWS = -3;  // each query's key range must be tested

// Visible tiles as compressed sparse rows: the tiles of line i (64 or 128 queries, or keys) are the
// entries [begin[i], begin[i + 1]), in ascending order.
struct TileList {
  const int* begin;  // [batches * heads * lines + 1]
  // {tile on the other axis, code for the line's first 64 queries or keys, code for its second 64,
  // 0}. For lines of 128 keys the last element is 2 * (number of later lines with the same tile) +
  // (1 if no earlier line has this tile).
  const int4* entries;
  const int2* slots;  // per entry: dS slots of the line's two tiles; -1: not stored
};

// The mask of a call. flash_dist/masks/plan.py makes the arrays, with axes [batches, heads, ...],
// where batches and heads are 1 or those of the call. `plane` is the index on these two axes.
//
// NOTE: MaskParams starts with the fields of MaskBand, but is not derived from it: nvcc would then
// compile the backward to other machine code.
struct MaskParams {
  MaskKind kind;
  int left, right;                // for BAND, see MaskBand
  int bottom_right;               // for BAND, see MaskBand
  int batch_planes, head_planes;  // plane = batch * batch_planes + query head * head_planes
  int query_tiles, key_tiles;     // ROWS, TILES: ceil(seqlen_q / 64), ceil(seqlen_k / 64)
  const int2* key_bounds;         // [batches] keys [x, y) that may be read; null: all
  const int2* rows;               // [plane, query_tiles * 64] keys [x, y) visible to each query
  const int4* query_ranges;  // [plane, query_tiles] min and max of rows.x, min and max of rows.y
  const int2* key_ranges;    // [plane, key_tiles] query tiles [x, y) that attend to each key tile
  const int* key_slots;      // [key_tiles + 1] dS slots before each key tile, same for all planes
  TileList by_query[2];      // TILES: lines of 64 and of 128 queries
  TileList by_key[2];        // TILES: lines of 64 and of 128 keys
  const uint2* bits;         // TILES: [code, 64 queries] a bit per key, low word first
};

inline MaskBand band_of(const MaskParams& p) { return {p.kind, p.left, p.right, p.bottom_right}; }

// The largest soft cap c for which kernels may compute c * tanh(x) as c * (1 - 2 / (1 + e^2x)): the
// error, c * 2^-23, is small enough for 16-bit operands. Larger caps need tanh_near(), which only
// the general families and the decode kernels have.
constexpr float FAST_CAP = 100.0f;

// Limits of softmax_scale / cap, within which the powers in the polynomial of sm90/score_mod.cuh
// are normal numbers. Calls outside these limits run on the general families.
constexpr float LEAST_INSIDE = 1e-5f, LARGEST_INSIDE = 1e4f;

// The score modification before masking, see core/scores.cuh. All zero: no modification.
struct ScoreParams {
  float softcap;       // 0: no soft cap
  const float* alibi;  // slopes [num_heads_q] or [batch, num_heads_q]; null: none
  int alibi_batch;     // batch stride: num_heads_q, or 0 if all batch entries share the slopes
  // Filled in at the call (host/scores.h):
  int has_score_mod;   // 1 if there is a soft cap, ALiBi or a bias
  float scale;         // scale of the softmax: softmax_scale, or 1 after a score modification
  float scale_inside;  // factor of q . k in the score modification
  float per_cap;       // 1 / softcap, or 0 without soft cap
};

// The bias that is added to the scores, see core/bias.cuh: [1 or batch, 1 or num_heads_q, seqlen_q,
// seqlen_k]. Strides are in elements, 0 along broadcast axes. All packed documents share one bias.
struct BiasParams {
  const void* data;  // null: no bias
  int64_t batch, head, row, key;
  int is_fp32;   // 1: fp32; 0: the dtype of q
  int in_pairs;  // 1: the bias of keys 2i and 2i + 1 can be loaded at once
  float factor;  // 1 / softmax_scale; filled in at the call
};

// Decides which weights of P are dropped, see core/dropout.cuh. All zero: no dropout.
struct DropoutParams {
  const int64_t* rng_state;  // [2] seed and offset, on the device; null: no dropout
  uint32_t threshold;        // 65536 * the kept fraction, shifted left by 16
  float scale;               // factor of kept weights: 1 / the kept fraction
};

// Locates the rows of a batch entry. The pointers are null for tensors with a batch axis, whose
// entries all have the full length. NOTE: the contents of the arrays are unchecked. Only
// core/sequence.cuh reads them.
struct Packing {
  const int* cu_seqlens_q;  // [batch + 1]
  const int* cu_seqlens_k;
};

// Divisor: a number known on the host, and factors with which kernels divide by it fast.
// BlockOrder: the order of blocks. See core/schedule.cuh.
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
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;  // packed: longest seqlen_q, seqlen_k
  int total_q, total_k;                                // packed: numbers of tokens
  int head_dim, head_dim_v;                            // columns without padding
  int heads_together;                                  // the `width` of core/schedule.cuh
  int leaves_few;  // packed: 1 if other kernels compute the sequences with is_few_queries()
  float softmax_scale;
  Packing packing;
  MaskParams mask;
  BlockOrder order;  // order, by_num_heads_q and by_group are filled in at the launch
  Divisor by_num_heads_q, by_group;
  ScoreParams scores;
  const float* sinks;  // [num_heads_q] extra logit in each row of a head, without v; null: none
  int sm_count;        // multiprocessors of the device
  BiasParams bias;
};

// NOTE: `dropout` is in a derived struct, because a new member of FwdParams would change the
// arguments of kernels without dropout.
struct FwdDropoutParams : FwdParams {
  DropoutParams dropout;
};

// Arguments of a forward launch.
template <class Params>
struct FwdCallOf {
  Params params;
  unsigned* tickets;  // a zeroed counter for kernels with KernelEntry::takes_tickets, else null
};
using FwdCall = FwdCallOf<FwdParams>;
using FwdDropoutCall = FwdCallOf<FwdDropoutParams>;

struct DeltaParams {
  View out, dout;     // [batch, seqlen_q, num_heads_kv, group, head_dim_v]
  const float* lse;   // see FwdParams::lse
  const float* dlse;  // same shape as lse, or null
  float* lse_log2;    // lse in base 2, rows as in core/sequence.cuh; +inf: no key, or padding
  float* delta;       // same rows as lse_log2; times DS_SCALE; 0: no key, or padding
  View dq, dk, dv;    // packed: the delta kernel writes zeros to their uncovered rows
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;
  int total_q, total_k;
  int head_dim, head_dim_v;
  int rows_padded;  // statistics rows per head
  Packing packing;
  Divisor by_tiles, by_num_heads_q, by_group;  // filled in at the launch
  const float* sinks;                          // see FwdParams::sinks
  float* dsinks;                               // shape of lse: terms of the gradient of the sinks
  int* dq_turns;                               // BwdParams::dq_turns, which is set to 0; null: none
  int64_t turns;                               // length of dq_turns
};

// One chunk of the backward: the units [unit_begin, unit_begin + units), which are (batch, kv head)
// pairs, and the keys [key_begin, key_end) of each unit. A query chunk is limited to some query
// heads of each group split, some of their queries, or both: seqlen_q and all pointers to query
// rows are those of the chunk. Other chunks have all queries of all query heads of each unit.
struct BwdParams {
  View q, k, v, dout;
  View dq, dk, dv;
  const float* lse_log2;  // [batch * num_heads_q, rows_padded], packed: [num_heads_q, rows_padded]
  const float* delta;
  void* ds;           // stored dS tiles of this chunk, see core/ds_layout.h; null: not stored
  float* dq_accum;    // sums of dQ [units, group, seqlen_q padded to 128, head_dim]; null: not kept
  float* dk_partial;  // [rows as in sum_rows, head_dim]; null: no partial sums
  float* dv_partial;  // like dk_partial, but head_dim_v columns
  int64_t ds_tiles_per_head;
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;
  int total_q, total_k;
  int head_dim, head_dim_v;
  int rows_padded;
  int unit_begin, units;
  int key_begin, key_end;  // multiples of the key tile; key_end may also be seqlen_k
  int group_split;
  int dq_first, dq_last;  // 1: first, last key chunk of these queries; the last one writes dq
  int heads_together;     // the `width` of core/schedule.cuh
  float softmax_scale;
  Packing packing;
  MaskParams mask;
  BlockOrder order;  // order and the divisors are filled in at the launch
  Divisor by_num_heads_kv, by_members, by_group_split;
  float* normalizers;  // fp32: factor of P per statistics row; the dQ kernel stores it for dK/dV
  // For the fused kernel, whose blocks add to dq_accum one after the other: the tile scheduler's
  // counter, then a semaphore per tile of 64 queries, all 0 at the launch. Otherwise null.
  int* dq_turns;
  ScoreParams scores;
  SumRows sum_rows;
  int member_begin, members;  // the chunk's query heads of each group split: first one, number
  int sums_first, sums_last;  // 1 in the first query chunk; 1 in the last, which writes dk, dv
  bool batch_invariant;       // results must not depend on the other sequences of the batch
  bool first_keys_first;      // blocks add to dQ in ascending key order; never for lists of tiles
  bool stores_ds;             // the dK/dV kernel may store dS
  int query_split;            // blocks that share the queries of each group split
  int64_t stripe_rows;        // distance in rows between the dK or dV sums of two query splits
  BiasParams bias;
};

struct BwdDropoutParams : BwdParams {
  DropoutParams dropout;
};

// Arguments of the backward kernel for short sequences, which also computes delta.
struct WholeParams {
  BwdParams p;
  View out;  // out, lse and dlse: see DeltaParams
  const float* lse;
  const float* dlse;  // may be null
};

// Queries, and keys, per block of core/bias_gradient.cuh; sm90/bwd_bias has its own tile size.
constexpr int BIAS_TILE = 64;

struct BiasGradientParams {
  BwdParams p;
  float* parts;  // [splits, batches, heads, queries, keys]; one sum per tile of a broadcast axis
  int batches, heads;            // sizes of the bias; 1 if broadcast
  int visits;                    // (batch entry, query head) pairs per element of the bias
  int splits;                    // blocks that share the visits of a tile
  int query_tiles, key_tiles;    // filled in at the launch
  bool sums_queries, sums_keys;  // true if the bias is broadcast along that axis
};

struct BiasGradientDropoutParams : BiasGradientParams {
  DropoutParams dropout;
};

// Arguments of a launch of a bias gradient kernel.
struct BiasGradientCall : BiasGradientDropoutParams {
  // Output of kernels that round the sums to the dtype of q (flash_dist_rounds_bias_gradient);
  // null: the output is the fp32 sums in `parts`.
  void* rounded;
  int sm_count;  // multiprocessors of the device; filled in at the call
};

struct ReduceParams {
  struct Sum {
    const float* partial;  // [splits, batch * num_heads_kv, seqlen_k, padded]
    View out;              // [batch, seqlen_k, num_heads_kv, 1, columns]
    int columns, padded;   // columns: without padding; padded: compiled columns
    float scale;
  };
  Sum sums[2];  // dK, dV
  int splits, batch, seqlen_k, num_heads_kv;
  int total_k;
  Packing packing;
};

}  // namespace flash_dist

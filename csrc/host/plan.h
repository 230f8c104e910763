// How one backward call is cut into launches: a pure function of shapes, the mask, the budget and
// device properties. The order of summation, and so every bit of the result, follows from it:
//
//   whole        whether a block makes all gradients of a unit whose sequences fit its tile;
//   fused        else whether one kernel makes dK, dV and dQ, where there is one;
//   spill        else whether dQ comes from the stored dS or from S and dP computed again;
//   group_split  how many partial sums make up dK and dV of a kv head, each of some query heads;
//   query_split  where it is fused, how many each of them is made of, each of some queries;
//   first_keys_first  where it is fused, the order of the sum of dQ;
//   steps        which kernels run, of which compiled size, on which keys, one after the other.
//
// Splits follow from how long blocks of the dK/dV kernel are and how many fill the device
// (host/splits.h). Their partial sums take at most half of the budget; without one they are 1. Then
// dS: all of it, or chunks that fill a wave each: whole units, of equal blocks in as many chunks as
// leave the least idle in the last rounds of dK/dV and dQ; of keys; or of queries x keys. Where they
// would leave the device idle, the next divisors are tried, as far as half of the budget goes, then
// smaller ones, which leave more for dS; if none helps, nothing is spilled.
//
// A query x key chunk has queries of one query head of each split, or a few whole query heads. It
// holds as little dS as the budget wants, however long the sequences are. Of all cuts of sequences
// the one of the least estimated time is taken. Queries of masks with arrays and of packed sequences
// are not cut.
//
// Both may change with the batch, since the more of it, the more of the budget it takes and the
// better it fills the GPU. Chunks change nothing: each dQ is one sum over its keys in ascending
// order, each dK and dV one over the heads and queries of its split, carried from chunk to chunk in
// fp32.
//
// Fused, dQ is a sum over blocks of keys in descending order, or ascending where the first keys come
// first, in dq_accum: of all units, or chunks of as many as fit, which fill a wave. Otherwise it is
// not fused; nor where it waits and half of the budget holds all of dS.
//
// Batch-invariant, none depends on anything but dtype, columns and views: fused where there is such a
// kernel, with chunks that fill a wave even if the budget does not hold them; else nothing is
// spilled. Neither groups nor queries are split, and the last keys come first. The price: without a
// fused kernel dQ costs seven products of matrices where spilling costs five, and few kv heads leave
// multiprocessors idle.
//
// Memory of one call beside inputs and gradients, each term rounded up to 256 bytes:
//
//   statistics  0 where whole, else 8 * num_heads_q * rows, rows = batch * up(seqlen_q),
//               packed: up(total_q + 128 * batch), with up() the next multiple of 128;
//               12 instead of 8 where dQ normalizes
//   ds          8192 * heads * ds_tiles_per_head, heads: of the largest chunk, group * units
//               unless queries are cut
//   dq_accum    4 * group * units * up(seqlen_q) * head_dim, of the largest chunk, when keys are
//               cut or it is fused; of one query chunk where all its keys come first
//   dq_turns    4 * (1 + group * units * up(seqlen_q) / 64), when it is fused
//   partial     4 * splits * batch * num_heads_kv * seqlen_k * (head_dim + head_dim_v), when
//               splits = group_split * query_split > 1; else 4 * units * keys * (head_dim +
//               head_dim_v) when queries are cut, keys: of a key chunk where all its queries come
//               first, otherwise seqlen_k
//
// with head_dim and head_dim_v as compiled, packed seqlen_q and seqlen_k the longest, and
// ds + dq_accum + dq_turns + partial <= budget, if not batch-invariant.
#pragma once

#include <cstdint>
#include <vector>

#include "core/band.h"
#include "roles.h"

namespace flash_dist {

// Columns that a kernel is compiled for: of q and k, of v and out.
struct KernelSize {
  int head_dim, head_dim_v;
};

// Whether a call may store dS at all: only then the kernel of dQ = dS K, if the dtype has one, is
// looked for and its tile counts.
bool may_store_ds(bool has_dq_gemm, int64_t budget, bool batch_invariant);

struct BwdShape {
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;  // packed: seqlens are the longest
  int total_q;                                         // packed: tokens, else -1
  int head_dim, head_dim_v;                            // columns of the compiled dK/dV kernel
  int columns_v;                                       // of v, those that exist
  bool aligned;     // scores depend on where a query is (ALiBi, bias): queries are not cut
  bool normalizes;  // dQ, computed again, comes first and finds what dK/dV multiply P by (fp32)
  MaskBand mask;
  const int* key_slots;  // MaskParams::key_slots in host memory; null: not known
  bool per_head;         // whether query heads have masks of their own
};

struct BwdKernels {
  int sm_count;
  int key_tile;       // keys per block of the dK/dV kernel
  int blocks_per_sm;  // resident blocks of that kernel
  int dq_rows;        // queries per block of the dQ = dS K kernel; 0: dS cannot be stored
  int dq_blocks_per_sm;
  int cluster = 1;  // blocks of the dK/dV kernel that share their keys
  // Whether the numbers of dK/dV, here and in BwdShape, are of the fused kernel.
  // A plan that is not `fused` then says that this kernel is not to be taken.
  bool fused = false;
};

// Launches of one dK/dV grid and one dQ grid: some (batch, kv head) units, some keys of each, and
// some queries: all, or those of some query heads of each split of the group.
struct BwdChunk {
  int64_t unit_begin, units;
  int key_begin, key_end;
  bool dq_first, dq_last;     // of the keys of these queries: dQ begins, is written
  int member_begin, members;  // query heads, counted from the first of a split
  int query_begin, query_end;
  bool sums_first, sums_last;  // of the queries of these keys: dK and dV begin, are written
  SumRows sum_rows;
  int64_t dq_accum;  // where fp32 dQ of these queries begins, in elements
};

// One launch. Kernels that share the workspace are of the size of the dK/dV kernel.
struct BwdStep {
  Role role;
  KernelSize size;
  int chunk;  // of dK/dV and dQ: index into chunks
};

struct BwdPlan {
  bool whole = false;   // one kernel makes dK, dV and dQ, a block those of a unit
  bool fused = false;   // else: one kernel makes dK, dV and dQ
  bool spill = false;   // else: dQ comes from the stored dS; false: it recomputes S and dP
  int group_split = 1;  // blocks that share the query heads of one kv head
  int query_split = 1;  // where it is fused, blocks that share the queries of each of these
  bool first_keys_first = false;  // where it is fused, dQ is summed from the first keys to the last
  bool waits = false;             // where it is fused, storing all of dS at once would be faster
  int rows_padded = 0;            // rows of statistics of one head
  std::vector<BwdChunk> chunks;
  std::vector<BwdStep> steps;
  int64_t ds_tiles_per_head = 0;  // most that any chunk needs
  // bytes
  int64_t ds = 0;          // the spilled dS of one chunk
  int64_t dq_accum = 0;    // fp32 dQ while keys are cut, or of one chunk where it is fused
  int64_t dq_turns = 0;    // counters of the fused kernel
  int64_t dk_partial = 0;  // fp32 dK of the splits, or between query chunks
  int64_t dv_partial = 0;
  int64_t stripe_rows = 0;  // of partial sums, from those of one query split to the next
  int64_t statistics = 0;   // lse, delta, normalizers; outside the budget, always needed

  // Partial sums of each dK and dV.
  int splits() const { return group_split * query_split; }
};

// budget: bytes for all but the statistics. 0 keeps to the kernels that need none of it, unless
// batch_invariant asks for the fused one.
BwdPlan plan_backward(const BwdShape& shape, const BwdKernels& kernels, int64_t budget,
                      bool batch_invariant);

// Of sequences that fit a tile of the kernel for these: that one launch, without a workspace.
BwdPlan plan_whole(const BwdShape& shape);

}  // namespace flash_dist

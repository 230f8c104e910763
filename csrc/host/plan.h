// Splits a backward call into launches: a pure function of shapes, mask, budget and device
// properties. A unit is a (batch, kv head) pair. The plan fixes the order of summation, and so
// every bit of the result. Its main fields:
//
//   whole        one block computes all gradients of a unit, whose sequences fit the block's tile;
//   fused        else: one kernel computes dK, dV and dQ, if there is such a kernel;
//   spill        else: dQ is computed from the stored dS; if false, from recomputed S and dP;
//   group_split  number of partial sums of dK and dV per kv head, each over some query heads;
//   query_split  fused only: number of parts of each group split, each over some queries;
//   first_keys_first  fused only: the order in which dQ is summed;
//   steps        the kernels to launch, in order, with their compiled size and their chunk.
//
// The number of splits depends on the length of the dK/dV blocks and on how many blocks fill the
// device (host/splits.h). The partial sums of the splits may take half of the budget; without a
// budget there is 1 split.
//
// The rest of the budget is for dS: all of dS, or chunk by chunk, where each chunk fills at least
// one wave. A chunk has complete units, or some keys of units, or some queries and keys. With
// blocks of equal length, the planner chooses the number of chunks of complete units whose last
// waves of dK/dV and dQ are fullest. If the chunks would leave the device idle, the planner tries
// the next larger divisors of the group as group_split, as long as the partial sums fit in half of
// the budget. Then it tries smaller divisors, which leave more memory for dS. If none works, dS is
// not stored.
//
// A query x key chunk has queries of one query head of each split, or a few complete query heads.
// With such chunks, dS fits into the budget for any sequence length. The planner takes the cut with
// the least estimated time. It does not cut queries of packed sequences, of masks with arrays, or
// of calls with ALiBi, bias or dropout.
//
// Splits, and whether dS is stored, may depend on the batch: a larger batch takes more of the
// budget and fills the GPU better. Chunks do not change bits: each dQ is one sum over its keys in
// ascending order, each dK and dV one sum over the heads and queries of its split. fp32 sums are
// kept between chunks.
//
// The fused kernel sums dQ in dq_accum over blocks of keys, in descending order, or in ascending
// order with first_keys_first. dq_accum holds dQ of all units, or of a chunk of as many units as
// fit. The call is not fused if a chunk would not fill a wave, or if the blocks would wait for each
// other and half of the budget can hold all of dS.
//
// In batch-invariant plans, the order of summation depends only on dtype, columns and views. They
// are fused if there is a fused kernel, with chunks that fill a wave even if they exceed the
// budget. Otherwise dS is not stored. group_split and query_split are 1, and dQ is summed from the
// last keys to the first. The cost: without a fused kernel, the backward takes seven matrix
// products instead of five, and few kv heads leave multiprocessors idle.
//
// Memory of a call in addition to inputs and gradients, each term rounded up to 256 bytes:
//
//   statistics  0 if whole, else 8 * num_heads_q * rows, rows = batch * up(seqlen_q),
//               packed: up(total_q + 128 * batch), with up() the next multiple of 128;
//               12 instead of 8 if the dQ kernel computes normalizers
//   ds          8192 * heads * ds_tiles_per_head, heads: query heads of the largest chunk, which
//               are group * units unless queries are cut
//   dq_accum    4 * group * units * up(seqlen_q) * head_dim of the largest chunk, if keys are cut
//               or the call is fused; of one query chunk if all its key chunks run in a row
//   dq_turns    4 * (1 + group * units * up(seqlen_q) / 64), if the call is fused
//   partial     4 * splits * batch * num_heads_kv * seqlen_k * (head_dim + head_dim_v), if
//               splits = group_split * query_split > 1; else, if queries are cut,
//               4 * units * keys * (head_dim + head_dim_v), keys: of a key chunk if all its query
//               chunks run in a row, otherwise seqlen_k
//
// head_dim and head_dim_v are the compiled sizes. seqlen_q and seqlen_k of packed calls are the
// longest. Unless the plan is batch-invariant, ds + dq_accum + dq_turns + partial <= budget.
#pragma once

#include <cstdint>
#include <vector>

#include "core/band.h"
#include "roles.h"

namespace flash_dist {

// The compiled size of a kernel: the columns of q and k, and those of v and out.
struct KernelSize {
  int head_dim, head_dim_v;
};

// True if a call may store dS. Only in this case must the caller look up the kernel for dQ = dS @ K
// and pass its tile in BwdKernels.
bool may_store_ds(bool has_dq_gemm, int64_t budget, bool batch_invariant);

struct BwdShape {
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;  // packed: longest seqlen_q, seqlen_k
  int total_q;                                         // packed: number of tokens, else -1
  int head_dim, head_dim_v;                            // compiled size of the dK/dV kernel
  int columns_v;                                       // columns of v without padding
  bool aligned;     // queries cannot be cut: ALiBi, bias and dropout depend on a query's position
  bool normalizes;  // fp32: the kernel that recomputes dQ runs first and computes the normalizers
  MaskBand mask;
  const int* key_slots;  // MaskParams::key_slots in host memory; null: not known
  bool per_head;         // query heads have different masks
};

struct BwdKernels {
  int sm_count;
  int key_tile;       // keys per block of the dK/dV kernel
  int blocks_per_sm;  // resident blocks of that kernel per multiprocessor
  int dq_rows;        // queries per block of the dQ = dS @ K kernel; 0: dS cannot be stored
  int dq_blocks_per_sm;
  int cluster = 1;  // number of blocks of the dK/dV kernel that share the same keys
  // True if the fields of the dK/dV kernel, here and in BwdShape, describe the fused kernel. If the
  // plan is not `fused`, the caller must plan again with the fields of the dK/dV kernel itself.
  bool fused = false;
};

// The work of one dK/dV launch and one dQ launch, or of one launch of the fused kernel or of
// BWD_WHOLE: some units, some keys of each unit, and either all queries, or some queries of some
// query heads of each group split.
struct BwdChunk {
  int64_t unit_begin, units;
  int key_begin, key_end;
  bool dq_first, dq_last;     // first and last key chunk of these queries
  int member_begin, members;  // query heads, counted from the first head of a group split
  int query_begin, query_end;
  bool sums_first, sums_last;  // first query chunk of these keys; last one, if query_split is 1
  SumRows sum_rows;
  int64_t dq_accum;  // element of dq_accum at which these queries start
};

// A launch. All kernels that share dS or fp32 sums have the compiled size of the dK/dV kernel.
struct BwdStep {
  Role role;
  KernelSize size;
  int chunk;  // index into chunks; 0 for delta and reduce
};

struct BwdPlan {
  bool whole = false;             // one kernel computes dK, dV and dQ, one unit per block
  bool fused = false;             // one kernel computes dK, dV and dQ; whole is false
  bool spill = false;             // not fused: dQ = stored dS @ K; false: S and dP are recomputed
  int group_split = 1;            // blocks that share the query heads of one kv head
  int query_split = 1;            // fused: blocks that share the queries of each group split
  bool first_keys_first = false;  // fused: sum dQ from the first keys to the last
  bool waits = false;             // fused: blocks wait so long that storing all dS would be faster
  int rows_padded = 0;            // statistics rows per head
  std::vector<BwdChunk> chunks;
  std::vector<BwdStep> steps;
  int64_t ds_tiles_per_head = 0;  // largest value of all chunks
  // Bytes, except stripe_rows:
  int64_t ds = 0;          // stored dS of the largest chunk
  int64_t dq_accum = 0;    // fp32 sums of dQ: kept between key chunks, or of a fused chunk
  int64_t dq_turns = 0;    // counters of the fused kernel
  int64_t dk_partial = 0;  // fp32 dK: partial sums of the splits, or sums kept between query chunks
  int64_t dv_partial = 0;
  int64_t stripe_rows = 0;  // distance in rows between the partial sums of two query splits
  int64_t statistics = 0;   // lse, delta, normalizers; not limited by the budget

  // Number of partial sums of dK and dV.
  int splits() const { return group_split * query_split; }
};

// Plans a backward call. budget: bytes for everything but the statistics. With 0 only kernels that
// need no other workspace are used, unless batch_invariant requires the fused one.
BwdPlan plan_backward(const BwdShape& shape, const BwdKernels& kernels, int64_t budget,
                      bool batch_invariant);

// Returns the plan of a call whose sequences fit into a tile of BWD_WHOLE: one launch without
// workspace.
BwdPlan plan_whole(const BwdShape& shape);

}  // namespace flash_dist

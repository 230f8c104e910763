// What one block of a backward kernel computes.
#pragma once

#include "core/mask.cuh"
#include "core/schedule.cuh"
#include "core/sequence.cuh"
#include "core/views.cuh"

namespace flash_dist {

// The slots of a band's dS, or what of it packed documents need.
__device__ __forceinline__ DsLayout ds_layout(const BwdParams& p, const Sequence& sequence) {
  return DsLayout(p.mask, sequence.seqlen_q, sequence.seqlen_k, p.packing.cu_seqlens_q != nullptr,
                  p.seqlen_q);
}

// The key tile, unit and split of a block of the dK/dV kernel.
struct DkdvBlock {
  int key0, unit, batch, head_kv, split;

  __device__ __forceinline__ DkdvBlock(const BwdParams& p, int block_n) {
    const int tiles = (p.key_end - p.key_begin + block_n - 1) / block_n;
    const BlockPlace place(fresh_block(), tiles, p.units * p.group_split, p.heads_together);
    key0 = p.key_begin + place.tile * block_n;
    unit = place.group / p.group_split;
    split = place.group - unit * p.group_split;
    batch = (p.unit_begin + unit) / p.num_heads_kv;
    head_kv = p.unit_begin + unit - batch * p.num_heads_kv;
  }
};

// Where a block of the dK/dV kernel works, for all its threads, in shared memory.
struct DkdvWork {
  const uint16_t *q, *dout;  // first query of the kv head's member 0
  int64_t statistics;        // row of that query
  int batch, head;           // head: query head of member 0
  int members_begin, members_end;
  int seqlen_q, seqlen_k;
  int key0;
  int ds_head;  // of the chunk, member 0
};

// One pipeline item: a stage of queries of one query head, for the two halves of 64 keys that a block
// can have.
struct DkdvItem {
  int row0;
  int member;          // of the group
  TilePlace place[2];  // slot: among all heads of the chunk, -1: not stored
};

// The query tile and head of a block of the dQ kernels; the longest causal tiles of a head come
// first.
struct DqBlock {
  int row0, head, batch, head_kv,
      member;  // head: unit * group + member, counted from the chunk's first unit

  __device__ __forceinline__ DqBlock(const BwdParams& p, int block_m) {
    const int q_tiles = (p.seqlen_q + block_m - 1) / block_m;
    const BlockPlace place(fresh_block(), q_tiles, p.units * p.group, p.heads_together);
    row0 = (q_tiles - 1 - place.tile) * block_m;
    head = place.group;
    const int unit = p.unit_begin + head / p.group;
    member = head % p.group;
    batch = unit / p.num_heads_kv;
    head_kv = unit - batch * p.num_heads_kv;
  }
};

}  // namespace flash_dist

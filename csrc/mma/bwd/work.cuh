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
    const BlockPlace place(fresh_block(), p.order);
    key0 = p.key_begin + place.tile * block_n;
    unit = divide(place.group, p.by_group_split);
    split = place.group - unit * p.group_split;
    batch = divide(p.unit_begin + unit, p.by_num_heads_kv);
    head_kv = p.unit_begin + unit - batch * p.num_heads_kv;
  }
};

// Query tiles of a band that see a key tile: [x, y); those that see all of it: [z, w).
__device__ __forceinline__ int4 band_tiles(const Mask& mask, const DsLayout& layout, int n) {
  const int key0 = n * MASK_TILE;
  if (key0 >= mask.seqlen_k) return {0, 0, 0, 0};
  int4 tiles{layout.query_begin(n), layout.query_end(n), 0, 0};
  if (key0 + MASK_TILE > mask.seqlen_k) return tiles;
  // Queries from the first whose keys end behind the tile to the last whose keys begin before it.
  const MaskParams& p = mask.p;
  const int first = p.right < UNBOUNDED ? key0 + MASK_TILE - 1 - mask.shift() - p.right : 0;
  tiles.z = max(first + MASK_TILE - 1, 0) / MASK_TILE;
  tiles.w = layout.query_tiles();
  if (p.left < UNBOUNDED) {
    tiles.w = min(tiles.w, max(key0 - mask.shift() + p.left + 1, 0) / MASK_TILE);
  }
  return tiles;
}

// Where a block of the dK/dV kernel works, for all its threads, in shared memory.
struct DkdvWork {
  const uint16_t *q, *dout;  // first query of the kv head's member 0
  int64_t statistics;        // row of that query
  const int4* entries;       // of the walk of members_begin; of all where the mask has one plane
  int begin, end;            // of that walk
  int batch, head;           // head: query head of member 0
  int members_begin, members_end;
  int seqlen_q, seqlen_k;
  int key0;
  int slot0[2];   // of query tile 0 of member 0, among all heads of the chunk; the two key tiles
  int4 tiles[2];  // BAND: the query tiles of each
};

// One pipeline item: a stage of queries of one query head.
struct DkdvItem {
  int4 known;  // ROWS: the queries' KeyRange; TILES: the list's entry
  int row0;
  int member;   // of the group
  int slot[2];  // of the two key tiles that a block can have, -1: not stored
};

// The query tile and head of a block of the dQ kernels; the longest causal tiles of a head come
// first.
struct DqBlock {
  int row0, head, batch, head_kv,
      member;  // head: unit * group + member, counted from the chunk's first unit

  __device__ __forceinline__ DqBlock(const BwdParams& p, int block_m) {
    const int q_tiles = (p.seqlen_q + block_m - 1) / block_m;
    const BlockPlace place(fresh_block(), p.order);
    row0 = (q_tiles - 1 - place.tile) * block_m;
    head = place.group;
    const int unit_of_chunk = divide(head, p.by_group);
    const int unit = p.unit_begin + unit_of_chunk;
    member = head - unit_of_chunk * p.group;
    batch = divide(unit, p.by_num_heads_kv);
    head_kv = unit - batch * p.num_heads_kv;
  }
};

template <class Config>
cudaError_t launch_dkdv(const void* kernel, const void* params, cudaStream_t stream) {
  BwdParams p = *static_cast<const BwdParams*>(params);
  const int64_t tiles = (p.key_end - p.key_begin + Config::BLOCK_N - 1) / Config::BLOCK_N;
  p.by_num_heads_kv = make_divisor(p.num_heads_kv);
  p.by_group_split = make_divisor(p.group_split);
  return launch_in_order<Config>(kernel, p, tiles, int64_t{p.units} * p.group_split, stream);
}

template <class Config>
cudaError_t launch_dq(const void* kernel, const void* params, cudaStream_t stream) {
  BwdParams p = *static_cast<const BwdParams*>(params);
  const int64_t tiles = (p.seqlen_q + Config::BLOCK_M - 1) / Config::BLOCK_M;
  p.by_num_heads_kv = make_divisor(p.num_heads_kv);
  p.by_group = make_divisor(p.group);
  return launch_in_order<Config>(kernel, p, tiles, int64_t{p.units} * p.group, stream);
}

}  // namespace flash_dist

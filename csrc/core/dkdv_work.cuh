// The work of a block of the dK/dV kernel, computed by one thread for all.
#pragma once

#include "core/blocks.cuh"
#include "core/dkdv_items.cuh"
#include "core/views.cuh"

namespace flash_dist {

// Finds where the dS of the block's key tiles begins, and which query tiles of a band see them. The
// chunk begins at key tile `first`.
template <class Config>
__device__ __forceinline__ void find_slots(DkdvWork& work, const BwdParams& p,
                                           const DkdvBlock& block, const Mask& mask,
                                           const DsLayout& layout, int first) {
  const int n = block.key0 / DS_TILE;
  const Mask mask0 = DkdvCursor<Config>::mask_of(p, work, 0);
  const int heads_before =  // of the chunk, less those before the first of this block's split
      (block.unit * p.group_split + block.split) * p.members - work.group_heads_begin;
  const int slot0 = heads_before * static_cast<int>(p.ds_tiles_per_head);
  for (int half = 0; half < (Config::BLOCK_N > MASK_TILE ? 2 : 1); ++half) {
    work.slot0[half] = slot0 + (mask.is_list() ? -p.mask.key_slots[first]
                                               : slot_base(mask0, layout, first, n + half));
    if (p.mask.kind == MaskKind::BAND) work.tiles[half] = band_tiles(mask, layout, n + half);
  }
}

// The query tiles of a block's query split. All splits have as many, counted for the longest sequence.
__device__ __forceinline__ int2 find_query_tiles(const BwdParams& p, const DkdvBlock& block) {
  const int tiles = (p.seqlen_q + MASK_TILE - 1) / MASK_TILE;
  const int each = (tiles + p.query_split - 1) / p.query_split;
  return {block.query_split * each, (block.query_split + 1) * each};
}

// head: the first query head of the group; mask: of the first query head of the block.
template <class Config>
__device__ __forceinline__ void find_work(DkdvWork& work, const BwdParams& p,
                                          const DkdvBlock& block, const Sequence& sequence,
                                          int heads_per_split, int head, const Mask& mask) {
  const DsLayout layout = ds_layout(p, sequence);
  const int first = p.key_begin / DS_TILE;
  work.key0 = block.key0;
  if constexpr (Config::SHARES_QUERIES) work.query_tiles = find_query_tiles(p, block);
  const QueryBlockIterator<Config::BLOCK_N> query_blocks =
      DkdvCursor<Config>::iterator_of(mask, layout, work);
  work.q = head_begin(p.q, block.batch, block.head_kv, 0) + sequence.q0 * p.q.row;
  work.dout = head_begin(p.dout, block.batch, block.head_kv, 0) + sequence.q0 * p.dout.row;
  work.statistics = statistics_begin(p, block.batch, head, sequence.q0);
  work.entries = query_blocks.entries;
  work.begin = query_blocks.begin;
  work.end = query_blocks.end;
  work.batch = block.batch;
  work.head = head;
  work.group_heads_begin = block.split * heads_per_split + p.member_begin;
  work.group_heads_end = work.group_heads_begin + p.members;
  work.seqlen_q = sequence.seqlen_q;
  work.seqlen_k = sequence.seqlen_k;
  find_slots<Config>(work, p, block, mask, layout, first);
}

}  // namespace flash_dist

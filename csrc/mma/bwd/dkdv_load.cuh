// How a block of the dK/dV kernel starts, and the copies of its stages.
#pragma once

#include "core/bwd_load.cuh"
#include "core/dkdv_work.cuh"
#include "mma/bwd/config.h"

namespace flash_dist {

// Finds the block's work, in one thread for all, and starts the copies of K and V.
template <class Config>
__device__ __forceinline__ void start_dkdv(const BwdParams& p, const DkdvBlock& block,
                                           const Sequence& sequence, DkdvWork& work,
                                           const DkdvTiles<Config>& tiles) {
  const int heads_per_split = p.group / p.group_split;
  const int head = block.head_kv * p.group;
  const int first = head + block.split * heads_per_split + p.member_begin;
  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, first));
  const RowSpan keys = mask.keys_that_exist(block.batch);
  if (threadIdx.x == 0) {
    find_work<Config>(work, p, block, sequence, heads_per_split, head, mask);
  }
  load_keys<Config>(p, block, sequence, keys, tiles);
  __syncthreads();  // work is there
}

// A stage of Q, dO, lse and delta on its way.
template <class Config>
struct DkdvCopies {
  using Target = typename Config::Target;
  QueryCopies<Config> queries;
  DkdvItem staged_item;  // thread 0's, where copies are staged in registers

  // Starts the copies of the item that the cursor is at.
  __device__ __forceinline__ void fetch(const BwdParams& p, typename Config::Smem& smem,
                                        const DkdvTiles<Config>& tiles,
                                        const DkdvCursor<Config>& cursor, int s) {
    const DkdvWork& work = smem.work;
    const int row0 = cursor.row0();
    const RowSpan rows{0, work.seqlen_q - row0};
    queries.fetch(p, work, tiles, row0, cursor.head_in_group, rows, s);
    if (threadIdx.x == 0) {
      describe(Target::HAS_CP_ASYNC ? smem.stage[s].item : staged_item, p, work, cursor, row0);
    }
    __syncwarp();
  }

  // Stores what fetch() left in registers.
  __device__ __forceinline__ void land(typename Config::Smem& smem, const DkdvTiles<Config>& tiles,
                                       int s) {
    queries.land(tiles, s);
    if constexpr (!Target::HAS_CP_ASYNC) {
      if (threadIdx.x == 0) smem.stage[s].item = staged_item;
    }
  }

 private:
  __device__ __forceinline__ static void describe(DkdvItem& item, const BwdParams& p,
                                                  const DkdvWork& work,
                                                  const DkdvCursor<Config>& cursor, int row0) {
    item.row0 = row0;
    item.head_in_group = cursor.head_in_group;
    item.slot[0] = cursor.slot(p, work, 0);
    if (Config::BLOCK_N > MASK_TILE) item.slot[1] = cursor.slot(p, work, 1);
    const int4* known = cursor.known(p, work);
    if (known == nullptr) return;
    if constexpr (Target::HAS_CP_ASYNC) {
      cp_async_16(shared_address(&item.known), known, true);
    } else {
      item.known = *known;
    }
  }
};

}  // namespace flash_dist

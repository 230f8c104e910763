// How a block of the dK/dV kernel starts, and how its operands come into shared memory.
#pragma once

#include "core/blocks.cuh"
#include "core/dkdv_work.cuh"
#include "core/statistics.cuh"
#include "core/tile.cuh"
#include "core/views.cuh"
#include "mma/bwd/config.h"

namespace flash_dist {

// Where the operands lie in shared memory, s: number of the stage.
template <class Config>
struct DkdvTiles {
  using Stage = typename Config::Stage;
  uint32_t k, v, stages;

  __device__ __forceinline__ explicit DkdvTiles(typename Config::Smem& smem)
      : k(shared_address(smem.k)),
        v(shared_address(smem.v)),
        stages(shared_address(&smem.stage[0])) {}

  __device__ __forceinline__ uint32_t q(int s) const {
    return stages + s * static_cast<int>(sizeof(Stage));
  }
  __device__ __forceinline__ uint32_t dout(int s) const {
    return q(s) + static_cast<int>(offsetof(Stage, dout));
  }
  __device__ __forceinline__ uint32_t lse(int s) const {
    return q(s) + static_cast<int>(offsetof(Stage, lse_log2));
  }
  __device__ __forceinline__ uint32_t delta(int s) const {
    return q(s) + static_cast<int>(offsetof(Stage, delta));
  }
};

// K and V of the block's keys, to stay there. keys: of the sequence, that exist.
template <class Config>
__device__ __forceinline__ void load_keys(const BwdParams& p, const DkdvBlock& block,
                                          const Sequence& sequence, const RowSpan& keys,
                                          const DkdvTiles<Config>& tiles) {
  using Target = typename Config::Target;
  const RowSpan here{keys.first - block.key0, keys.end - block.key0};
  TileCopy<Target, Config::BLOCK_N, Config::HEAD_DIM, Config::THREADS> copy_k;
  copy_k.fetch(
      tiles.k,
      head_begin(p.k, block.batch, block.head_kv, 0) + (sequence.k0 + block.key0) * p.k.row,
      p.k.row, here, p.head_dim);
  copy_k.land(tiles.k);
  TileCopy<Target, Config::BLOCK_N, Config::HEAD_DIM_V, Config::THREADS> copy_v;
  copy_v.fetch(
      tiles.v,
      head_begin(p.v, block.batch, block.head_kv, 0) + (sequence.k0 + block.key0) * p.v.row,
      p.v.row, here, p.head_dim_v);
  copy_v.land(tiles.v);
}

// Finds the block's work, by one thread for all, and starts the copies of K and V.
template <class Config>
__device__ __forceinline__ void start_dkdv(const BwdParams& p, const DkdvBlock& block,
                                           const Sequence& sequence, DkdvWork& work,
                                           const DkdvTiles<Config>& tiles) {
  const int members = p.group / p.group_split;
  const int head = block.head_kv * p.group;
  const int first = head + block.split * members + p.member_begin;
  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, first));
  const RowSpan keys = mask.keys_that_exist(block.batch);
  if (threadIdx.x == 0) {
    find_work<Config>(work, p, block, sequence, members, head, mask);
  }
  load_keys<Config>(p, block, sequence, keys, tiles);
  __syncthreads();  // work is there
}

// A stage of Q, dO, lse and delta on its way.
template <class Config>
struct DkdvCopies {
  using Target = typename Config::Target;
  TileCopy<Target, Config::BLOCK_M, Config::HEAD_DIM, Config::THREADS> copy_q;
  TileCopy<Target, Config::BLOCK_M, Config::HEAD_DIM_V, Config::THREADS> copy_dout;
  StatCopy<Target, Config::BLOCK_M> copy_stats;
  DkdvItem staged_item;  // thread 0's, where copies are staged in registers

  // Starts the copies of the item that the cursor is at.
  __device__ __forceinline__ void fetch(const BwdParams& p, typename Config::Smem& smem,
                                        const DkdvTiles<Config>& tiles,
                                        const DkdvCursor<Config>& cursor, int s) {
    const DkdvWork& work = smem.work;
    const int row0 = cursor.row0();
    const int member = cursor.member;
    const RowSpan rows{0, work.seqlen_q - row0};
    copy_q.fetch(tiles.q(s), work.q + member * p.q.head_group + row0 * p.q.row, p.q.row, rows,
                 p.head_dim);
    copy_dout.fetch(tiles.dout(s), work.dout + member * p.dout.head_group + row0 * p.dout.row,
                    p.dout.row, rows, p.head_dim_v);
    const int64_t row = work.statistics + static_cast<int64_t>(member) * p.rows_padded + row0;
    copy_stats.fetch(tiles.lse(s), p.lse_log2 + row, p.delta + row);
    if (threadIdx.x == 0) {
      describe(Target::HAS_CP_ASYNC ? smem.stage[s].item : staged_item, p, work, cursor, row0);
    }
    __syncwarp();
  }

  // Stores what fetch() left in registers.
  __device__ __forceinline__ void land(typename Config::Smem& smem, const DkdvTiles<Config>& tiles,
                                       int s) {
    copy_q.land(tiles.q(s));
    copy_dout.land(tiles.dout(s));
    copy_stats.land(tiles.lse(s));
    if constexpr (!Target::HAS_CP_ASYNC) {
      if (threadIdx.x == 0) smem.stage[s].item = staged_item;
    }
  }

 private:
  __device__ __forceinline__ static void describe(DkdvItem& item, const BwdParams& p,
                                                  const DkdvWork& work,
                                                  const DkdvCursor<Config>& cursor, int row0) {
    item.row0 = row0;
    item.member = cursor.member;
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

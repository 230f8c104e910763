// dK, dV and the dS that the dQ kernel multiplies by K. No atomics: a block owns its keys.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// Grid      x = key tile, (batch, kv head) pair of the chunk, group split.
// Block     SPLIT = 1: a warp owns ROWS keys over the whole head_dim. P^T and dS^T stay in its
//           registers as A operands. SPLIT > 1: dK and dV of whole rows would take all
//           registers, so SPLIT warps share ROWS keys. Each computes S^T and dP^T for part of the
//           stage's queries, exchanges P^T and dS^T through shared memory, and accumulates part of
//           the columns.
// Shared    K and V (for the block's lifetime), STAGES stages of Q, dO, lse and delta.
// Pipeline  The query tiles of every query head of the group split, in ascending order, which is
//           the order of summation. Between query chunks the sums are kept in memory.
#pragma once

#include "core/blocks.cuh"
#include "core/bwd_load.cuh"
#include "core/dkdv_items.cuh"
#include "core/ds_scale.h"
#include "core/pipeline.cuh"
#include "core/sequence.cuh"
#include "mma/bwd/config.h"
#include "mma/bwd/dkdv_steps.cuh"
#include "mma/fragments.cuh"

namespace flash_dist {

// Finds the block's work in one thread, and starts the copies of K and V.
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
  __syncthreads();  // the work is stored
}

// The copies of a stage of Q, dO, lse and delta.
template <class Config>
struct DkdvCopies {
  using Target = typename Config::Target;
  QueryCopies<Config> queries;
  DkdvItem staged_item;  // thread 0's item for land(), if copies are staged in registers

  // Starts the copies of the item at the cursor.
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

  // Stores the data that fetch() left in registers.
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

// Writes the warp's part of dK and dV, either as fp32 partial sums or rounded to T. Rounded rows go
// through the warp's rows of K and V in shared memory.
template <class Config>
__device__ __forceinline__ void store_sums(DkSum<Config>& dk, const DvSum<Config>& dv,
                                           const BwdParams& p, const DkdvTiles<Config>& tiles,
                                           const DkdvWarp<Config>& warp) {
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  const DkdvBlock block(p, Config::BLOCK_N);
  const Sequence sequence(p, block.batch);
  const int row0 = block.key0 + warp.row0;
  const int limit = sequence.seqlen_k - row0;
  if (keeps_sums(p)) {
    const int64_t row = first_sum_row(p, block) + row0;
    store_partial<Config::SPLIT>(dk, p.dk_partial + row * HEAD_DIM, limit, warp.part);
    store_partial<Config::SPLIT>(dv, p.dv_partial + row * HEAD_DIM_V, limit, warp.part);
  } else {
    dk.scale(gradient_scale<typename Config::T>(p.softmax_scale));
    store_sum<Config, HEAD_DIM>(
        dk, tiles.k + warp.row0 * HEAD_DIM * 2, warp.part,
        head_begin(p.dk, block.batch, block.head_kv, 0) + (sequence.k0 + row0) * p.dk.row, p.dk.row,
        limit, p.head_dim);
    store_sum<Config, HEAD_DIM_V>(
        dv, tiles.v + warp.row0 * HEAD_DIM_V * 2, warp.part,
        head_begin(p.dv, block.batch, block.head_kv, 0) + (sequence.k0 + row0) * p.dv.row, p.dv.row,
        limit, p.head_dim_v);
  }
}

// Loads the warp's part of dK and dV, which the previous query chunk stored.
template <class Config>
__device__ __forceinline__ void load_sums(DkSum<Config>& dk, DvSum<Config>& dv, const BwdParams& p,
                                          const DkdvBlock& block, int seqlen_k,
                                          const DkdvWarp<Config>& warp) {
  const int row0 = block.key0 + warp.row0;
  const int64_t row = first_sum_row(p, block) + row0;
  load_partial<Config::SPLIT>(dk, p.dk_partial + row * Config::HEAD_DIM, seqlen_k - row0,
                              warp.part);
  load_partial<Config::SPLIT>(dv, p.dv_partial + row * Config::HEAD_DIM_V, seqlen_k - row0,
                              warp.part);
}

template <class Config>
__device__ __forceinline__ void dkdv_block(const BwdParams& p) {
  using Target = typename Config::Target;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DkdvTiles<Config> tiles(smem);
  const DkdvWarp<Config> warp;
  const DkdvBlock block(p, Config::BLOCK_N);
  const Sequence sequence(p, block.batch);
  if (block.key0 >= sequence.seqlen_k) return;
  start_dkdv<Config>(p, block, sequence, smem.work, tiles);

  DkdvCopies<Config> copies;
  DkdvCursor<Config> cursor(p, smem.work);
  const auto fetch = [&](int, int s) {
    copies.fetch(p, smem, tiles, cursor, s);
    cursor.next(p, smem.work);
  };
  const auto land = [&](int s) { copies.land(smem, tiles, s); };

  DkSum<Config> dk;
  DvSum<Config> dv;
  dk.clear();
  dv.clear();
  if (!p.sums_first) load_sums<Config>(dk, dv, p, block, sequence.seqlen_k, warp);
  const float scale_log2 = p.scores.scale * LOG2_E;
  const DkdvCompute<Config> compute{p, smem, tiles, warp, dk, dv, scale_log2};
  run_pipeline<Target, Config::STAGES>(DkdvCursor<Config>::count(p, smem.work), fetch, land,
                                       compute);
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  // All warps have read K and V, and the copies of K and V are complete even without items.
  __syncthreads();
  if constexpr (Config::DROPS) dv.scale(dropout_of(p).scale);
  store_sums<Config>(dk, dv, p, tiles, warp);
}

}  // namespace flash_dist

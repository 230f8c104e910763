// dQ, dK and dV on Hopper in one kernel: dS never leaves the multiprocessor. As in
// bwd/dkdv.cuh, a block owns its keys and computes their dK and dV. It also computes a part of dQ.
// A semaphore per query tile orders the blocks that add their parts.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q        dQ = dS @ K
//
// Grid      x = one block for each key tile, group split and query split of each (batch, kv head)
//           pair of the chunk. A tile scheduler, an atomic counter, gives each block its tile.
// Block     Warpgroup 0: one thread loads (loader.cuh), and threads of other warps store dQ to
//           global memory (dq_store.cuh). Each of these threads describes its own items: one thread
//           would be too slow for all. Warpgroups 1 and 2: 64 keys each (keys.cuh). Warpgroup 3: dQ
//           (dq.cuh). At head_dim 192/128 there are no registers for warpgroup 3: warpgroups 1 and
//           2 then compute half of the columns of dQ each.
// Shared    K and V for the block's lifetime, STAGES stages of Q, dO, lse and delta, DS_STAGES of
//           dS^T, DQ_STAGES of dQ.
// Pipeline  The block's query tiles, for every query head of the split: head by head, the tiles of
//           a head in ascending order. If the first keys come first: tiles in descending order, all
//           heads of a tile before the next tile. This is the order of summation of dK and dV. If
//           the registers hold both S^T and dP^T, the product for dP^T runs while P^T is computed,
//           and that for dV while dS^T is computed. The warpgroups of keys do not wait for each
//           other, so that one multiplies while the other computes exponentials. The exception is
//           192/128, where each warpgroup reads all of dS^T after its product for dK.
//
// Order     The dQ of a query tile is summed over the key blocks visible to the tile, from the last
//           keys to the first, or from the first to the last (BwdParams::first_keys_first). The sum
//           is in fp32 in global memory, in the order of the registers of warpgroup 3. The first
//           block stores its part, and the next blocks add theirs. The last block adds the sum to
//           its part, scales and rounds the result, and writes it to dQ. The semaphore of a tile
//           counts the blocks that have added to the sum. find_order() numbers the blocks of a tile
//           0, 1, 2, ... without a gap. For query tiles without a visible key, the block of the
//           first keys sets dQ to zero.
//
// Choice    Under a causal mask the first keys are visible to the most queries. With the last keys
//           first, the blocks of a round (those that run together) begin at once, each at the
//           queries of its keys. But the longest blocks begin last, and from round to round the
//           blocks begin at queries further apart, until these no longer fit in L2. With the first
//           keys first, all blocks begin at the last queries, wait for each other's semaphores in
//           the first round, and then stay one step apart, however long the sequence is. Later
//           blocks are shorter.
//
// No deadlock: a block waits only for blocks of its own group (pair, group split, query split) that
// come earlier in the order. The tile scheduler assigns the tiles of a group in that order, so
// these blocks have smaller numbers: they run or have run, whatever the mask is, and in whatever
// order the hardware starts blocks. Of the blocks that have not ended, the one with the smallest
// number waits for no block. Within a block, all roles use the stages of a ring in the order of
// items. NOTE: the order follows from the mask's arrays and cu_seqlens, which each block reads
// itself. If they change during the kernel, blocks may wait forever.
#pragma once

#include "core/uncovered.cuh"
#include "ptx/registers.cuh"
#include "sm90/bwd_fused/dq_store.cuh"
#include "sm90/bwd_fused/keys.cuh"
#include "sm90/bwd_fused/loader.cuh"

namespace flash_dist {

template <class Config>
__device__ __forceinline__ void make_fused_barriers(typename Config::Smem& smem) {
  constexpr int DQ_WARPS = (Config::KEYS_MULTIPLY ? Config::CONSUMERS : 1) * WARPS_OF_GROUP;
  mbarrier_init(shared_address(&smem.keys_full), 1);
  smem.barriers.make(Config::CONSUMERS * WARPS_OF_GROUP);
#pragma unroll
  for (int i = 0; i < Config::DQ_ITEMS; ++i) mbarrier_init(shared_address(&smem.described[i]), 1);
#pragma unroll
  for (int i = 0; i < Config::DS_STAGES; ++i) {
    mbarrier_init(shared_address(&smem.ds_full[i]), Config::CONSUMERS * WARPS_OF_GROUP);
    mbarrier_init(shared_address(&smem.ds_empty[i]), DQ_WARPS);
  }
#pragma unroll
  for (int i = 0; i < Config::DQ_STAGES; ++i) {
    mbarrier_init(shared_address(&smem.dq_ready[i]), 1);
    mbarrier_init(shared_address(&smem.dq_done[i]), DQ_WARPS);
  }
  if constexpr (Config::KEYS_MULTIPLY) mbarrier_init(shared_address(&smem.dq_read), 1);
  if constexpr (Config::BIAS_IN_BOXES) {
#pragma unroll
    for (int i = 0; i < Config::DS_STAGES; ++i)
      mbarrier_init(shared_address(&smem.bias_full[i]), 1);
  }
}

// Zeroes dq of query tiles without a visible key. Only the blocks of key 0 and query split 0 do so.
template <class Config>
__device__ __forceinline__ void clear_masked_queries(const BwdParams& p, const DkdvBlock& block,
                                                     const Sequence& sequence) {
  const bool masks_some = p.mask.kind != MaskKind::BAND || p.mask.left < UNBOUNDED ||
                          p.mask.right < UNBOUNDED || sequence.seqlen_k == 0;
  if (block.key0 > 0 || block.query_split > 0 || !masks_some) return;
  const DsLayout layout = ds_layout(p, sequence);
  const int heads_per_split = p.group / p.group_split;
  const int tiles = (sequence.seqlen_q + MASK_TILE - 1) / MASK_TILE;
  const int lane = threadIdx.x % 32;
  const auto mask_of = [&](int head_in_group) {
    return Mask(p.mask,
                MaskPlace(p.mask, sequence, block.batch, block.head_kv * p.group + head_in_group));
  };
#pragma unroll 1
  for (int i0 = threadIdx.x / 32 * 32; i0 < heads_per_split * tiles; i0 += Config::THREADS) {
    // Each lane tests one tile. All lanes then write the rows of the fully masked tiles.
    const int own = i0 + lane;
    const bool exists = own < heads_per_split * tiles;
    const bool visible =
        !exists ||
        is_visible(p, mask_of(block.split * heads_per_split + own / tiles), layout, own % tiles);
#pragma unroll 1
    for (unsigned masked = __ballot_sync(0xffffffffu, !visible); masked != 0;
         masked &= masked - 1) {
      const int i = i0 + __ffs(masked) - 1;
      const int m = i % tiles;
      uint16_t* dq =
          head_begin(p.dq, block.batch, block.head_kv, block.split * heads_per_split + i / tiles) +
          static_cast<int64_t>(sequence.q0) * p.dq.row;
      const int end = min((m + 1) * MASK_TILE, sequence.seqlen_q);
#pragma unroll 1
      for (int row = m * MASK_TILE + lane / ROW_LANES; row < end; row += 32 / ROW_LANES)
#pragma unroll 1
        for (int column = lane % ROW_LANES * 8; column < p.head_dim; column += ROW_LANES * 8) {
          store_global_16(dq + row * p.dq.row + column, {0, 0, 0, 0});
        }
    }
  }
}

// Returns the query split of a block. Removes it from place.group, which then numbers the pair and
// the group split. The last queries come first: with a causal mask, most keys are visible to them.
__device__ __forceinline__ int take_query_split(BlockPlace& place, const BwdParams& p) {
  const int groups = p.units * p.group_split;
  const int rank = place.group / groups;
  place.group -= rank * groups;
  return p.query_split - 1 - rank;
}

template <class Config>
__device__ __forceinline__ void fused_sm90_block(const typename Config::Params& params) {
  const BwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  if (threadIdx.x == 0) {
    BlockPlace place(fetch_next(p.dq_turns), p.order);
    prefetch_maps(params.q, params.k, params.v, params.dout);
    if constexpr (Config::BIAS_IN_BOXES) prefetch_map(params.bias);
    make_fused_barriers<Config>(smem);
    mbarriers_made();
    const int last = (p.seqlen_k + Config::BLOCK_N - 1) / Config::BLOCK_N - 1;
    if (!p.first_keys_first) place.tile = last - place.tile;
    const int query_split = take_query_split(place, p);
    DkdvBlock block(p, Config::BLOCK_N, place);
    block.query_split = query_split;
    const Sequence sequence(p, block.batch);
    smem.work.block = block;
    smem.work.sequence = sequence;
    if (block.key0 < sequence.seqlen_k) find_dkdv_work<Config>(smem.work, p, block, sequence);
  }
  __syncthreads();  // the work and the barriers are initialized
  clear_masked_queries<Config>(p, smem.work.block, smem.work.sequence);
  if (smem.work.block.key0 >= smem.work.sequence.seqlen_k) return;

  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) {
      FusedSm90Loader<Config>{params, smem}.load();
    } else if (warp <= Config::DQ_THREADS) {
      FusedSm90DqStore<Config>{params, smem}.store_dq(warp - 1);
    }
  } else if (threadIdx.x < (1 + Config::CONSUMERS) * WARPGROUP) {
    take_registers<Config::CONSUMER_REGISTERS>();
    FusedSm90Keys<Config>{params, smem}.compute();
  } else if constexpr (!Config::KEYS_MULTIPLY) {
    give_registers<Config::DQ_REGISTERS>();
    FusedSm90Dq<Config>{params, smem}.sum_queries();
  }
}

}  // namespace flash_dist

// Steps that the forward kernels of mma/ (16-bit dtypes) and f32/ (fp32) share.
#pragma once

#include <type_traits>

#include "core/bias.cuh"
#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/dropout.cuh"
#include "core/mask.cuh"
#include "core/scores.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

// Commits a group of cp.async copies (sm_80 and newer).
template <class Target>
__device__ __forceinline__ void commit_copies() {
  if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();
}

// Waits until every thread has at most its PENDING newest groups of copies in flight.
template <class Target, int PENDING = 0>
__device__ __forceinline__ void wait_for_copies() {
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<PENDING>();
  __syncthreads();
}

// Calls Put::put() (core/bias.cuh) for a warp's scores and their bias. row0: the warp's first query
// in the tile.
template <class T, class Put = AddBias, bool PAIRS = true, int MT, int NT>
__device__ __forceinline__ void add_bias(Accumulator<MT, NT>& s, const FwdParams& p, int block_m,
                                         int row0, int key0) {
  if (p.bias.data == nullptr) return;
  const FwdBlock again(p, block_m);
  const BiasPlace place{again.batch, again.head, again.row0 + row0, key0};
  add_bias<T, false, Put, PAIRS>(s, p.bias, place, p.seqlen_q, p.seqlen_k);
}

// Returns the position of a warp's P for dropout. row0: the warp's first query in the tile. key0:
// the warp's first key.
__device__ __forceinline__ DropoutPlace dropout_place(const FwdParams& p, int block_m, int row0,
                                                      int key0) {
  const FwdBlock again(p, block_m);
  return {sequence_head(p, again.batch, again.head), again.row0 + row0, key0};
}

// Applies soft cap, ALiBi, the bias (fp32 only) and the mask to a warp's scores S = Q @ K(j).T.
// row0, key: the warp's first query and first key in the tile. ALWAYS: the caller also passes key
// blocks that need no mask.
template <Tanh TANH, class T, bool ALWAYS, template <int, int> class Work, int BLOCK_M, int BLOCK_N,
          int MT, int NT>
__device__ __forceinline__ void modify_and_mask(Accumulator<MT, NT>& s, const FwdParams& p,
                                                const Work<BLOCK_M, BLOCK_N>& work, int row0, int j,
                                                int key = 0) {
  int code = work.blocks.code(j, row0 / MASK_TILE);
  if (p.scores.has_score_mod) {
    const int first = work.row0 + row0 + work.place.seqlen_k - work.place.seqlen_q;
    apply_score_mod<TANH>(s, p.scores, {work.slope, first, work.blocks.key0(j) + key});
    if (sizeof(Element<T>) > 2)
      add_bias<T, AddBias, !ALWAYS>(s, p, BLOCK_M, row0, work.blocks.key0(j) + key);
    if (work.blocks.is_full(j)) code = TILE_FULL;
  }
  if (ALWAYS && work.blocks.is_full(j)) code = TILE_FULL;
  if (code != TILE_FULL) {
    apply_mask(s, Mask(p.mask, work.place), work.row0 + row0, work.blocks.key0(j) + key, code);
  }
}

// Calls step(masked) for key blocks j down to the first. masked is false for the full blocks, which
// need no mask, and true for the blocks before and after them. With a score modification or ALWAYS,
// masked is true for all blocks. ALWAYS compiles only one loop.
template <bool ALWAYS, class Blocks, class Step>
__device__ __forceinline__ void for_key_blocks(const FwdParams& p, const Blocks& blocks, int& j,
                                               const Step& step) {
  if constexpr (ALWAYS) {
#pragma unroll 1
    for (; j >= blocks.begin; --j) step(std::true_type{});
  } else {
#pragma unroll 1
    for (int round = 0; round < 2; ++round) {
      const bool until_full = round == 0 && !p.scores.has_score_mod;
      const int masked_until = until_full ? blocks.full_end : blocks.begin;
#pragma unroll 1
      for (; j >= masked_until; --j) step(std::true_type{});
#pragma unroll 1
      for (; j >= blocks.full_begin; --j) step(std::false_type{});
    }
  }
}

}  // namespace flash_dist

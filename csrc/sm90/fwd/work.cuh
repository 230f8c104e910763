// The work tiles that the loader of the forward kernel for Hopper passes to the consumers.
#pragma once

#include "core/blocks.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/ring.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

// The number of work tiles in shared memory. The loader is ahead of the consumers, so that they
// need not wait after short tiles.
constexpr int WORKS = 4;

// The loader's state between tiles. It is in shared memory, as the loader has few registers.
struct FwdSm90Progress {
  unsigned number;          // number of the next tile
  unsigned works;           // Ring::passed of the work tiles
  unsigned queries, tiles;  // Ring::passed of Q, and of K and V
};

// One query tile. It is in shared memory, as the accumulators need the registers.
struct FwdSm90Work {
  FwdBlock block;
  Sequence sequence;
  MaskPlace place;
  RowSpan keys;  // the keys that exist
  KeyBounds bounds;
  unsigned queries, tiles;  // as in FwdSm90Progress, at the start of this tile

  // place_block() and find_keys() fill in the members one by one. Later members are computed from
  // earlier ones that are read back from shared memory, as the loader has few registers.
  __device__ __forceinline__ void place_block(const FwdParams& p, int block_m, int number) {
    block = FwdBlock(p, block_m, number);
    written();
    sequence = Sequence(p, block.batch);
    written();
  }
  __device__ __forceinline__ void find_keys(const FwdParams& p, int block_m, int block_n) {
    place = MaskPlace(p.mask, sequence, block.batch, block.head);
    written();
    keys = Mask(p.mask, place).keys_that_exist(block.batch);
    written();
    bounds = KeyBounds(Mask(p.mask, place), block.row0, block_m, block_n);
    written();
  }

  // Marks the end: there are no more tiles.
  __device__ __forceinline__ void close() { block.row0 = NO_TILE; }
  __device__ __forceinline__ bool is_closed() const { return block.row0 == NO_TILE; }

  __device__ __forceinline__ bool has_queries() const { return block.row0 < sequence.seqlen_q; }
  __device__ __forceinline__ bool has_keys() const { return bounds.begin < bounds.end; }

 protected:
  // Makes the compiler read shared memory again from here on.
  __device__ __forceinline__ static void written() { asm volatile("" ::: "memory"); }

 private:
  static constexpr int NO_TILE = -1;  // value of block.row0 that marks the end
};

// A query tile with the steps of each warpgroup.
template <int CONSUMERS>
struct FwdSm90SkippingWork : FwdSm90Work {
  StepBounds own[CONSUMERS];  // one for the 64 queries of each warpgroup

  __device__ __forceinline__ void find_keys(const FwdParams& p, int block_m, int block_n) {
    FwdSm90Work::find_keys(p, block_m, block_n);
#pragma unroll 1
    for (int i = 0; i < CONSUMERS; ++i) {
      own[i] = find_own(p, block.row0 + i * 64, block_n);
      written();
    }
  }

 private:
  __device__ __forceinline__ StepBounds find_own(const FwdParams& p, int row0, int block_n) const {
    if (bounds.entries != nullptr) return bounds;
    if (row0 >= sequence.seqlen_q) {
      return {bounds.begin, bounds.begin, bounds.begin, bounds.begin};
    }
    const KeyBounds b(Mask(p.mask, place), row0, 64, block_n);
    const int end = max(b.end, bounds.begin), begin = min(max(b.begin, bounds.begin), end);
    return {begin, min(max(b.full_begin, begin), end), min(max(b.full_end, begin), end), end};
  }
};

// next_work(): waits until the loader may write the next work tile, and returns it. publish_work():
// passes that work tile to the consumers.
template <class Config>
__device__ __forceinline__ typename Config::Work& next_work(const typename Config::Params& params,
                                                            typename Config::Smem& smem) {
  // With a tile counter, take only one tile ahead: no other block can take a tile that waits here.
  const unsigned works = smem.progress.works;
  const unsigned free = params.tickets == nullptr ? works : works + WORKS - 2;
  smem.work_barriers.wait_for_place(Ring<WORKS>{free});
  return smem.work[Ring<WORKS>{works}.stage()];
}
template <class Config>
__device__ __forceinline__ void publish_work(typename Config::Smem& smem) {
  smem.work_barriers.arrive(Ring<WORKS>{smem.progress.works});
  ++smem.progress.works;
}

// Initializes the barriers of a block. All threads of the block call this. other_readers: number of
// warps, in addition to the consumer warps, that read the work tiles.
template <class Config>
__device__ __forceinline__ void make_fwd_barriers(const typename Config::Params& params,
                                                  typename Config::Smem& smem,
                                                  int other_readers = 0) {
  if (threadIdx.x == 0) {
    prefetch_maps(params.q, params.k, params.v, params.out);
    constexpr int WARPS = Config::CONSUMERS * WARPS_OF_GROUP;
    smem.work_barriers.make(WARPS + other_readers);
    smem.q_barriers.make(WARPS);
    smem.k_barriers.make(WARPS);
    smem.v_barriers.make(WARPS);
    mbarriers_made();
  }
  __syncthreads();
}

}  // namespace flash_dist

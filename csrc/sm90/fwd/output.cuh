// The work tiles of a consumer warpgroup of the forward kernel for Hopper, and their 64 rows of out.
#pragma once

#include "core/sequence.cuh"
#include "core/uncovered.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/fwd/config.h"
#include "sm90/rows.cuh"

namespace flash_dist {

// The 64 rows of out and lse that a warpgroup stores. With pairs of blocks, block `rank` stores
// COLUMNS columns of out.
struct FwdSm90Rows {
  const FwdParams& p;
  const FwdSm90Work& work;

  // row0(): this warpgroup's first row in the sequence. count(): number of rows from there to the
  // sequence's end. first(): address of the first row in out.
  __device__ __forceinline__ int row0() const { return work.block.row0 + consumer() * 64; }
  __device__ __forceinline__ int count() const { return work.sequence.seqlen_q - row0(); }
  __device__ __forceinline__ uint16_t* first() const {
    const FwdBlock& block = work.block;
    return head_begin(p.out, block.batch, block.head_kv, block.head_in_group) +
           (work.sequence.q0 + row0()) * p.out.row;
  }

  // Stores the results of queries without a visible key: 0 in out. Block 0 also stores lse: -inf,
  // or the sink.
  template <int COLUMNS>
  __device__ __forceinline__ void store_empty(int rank = 0) const {
    constexpr int CHUNKS = COLUMNS / 8;  // chunks of 16 bytes per row
    const int thread = fresh_thread() % WARPGROUP;
    const int existing = min(count(), 64);
    uint16_t* out = first();
#pragma unroll 1
    for (int i = thread; i < existing * CHUNKS; i += WARPGROUP) {
      const int column = rank * COLUMNS + i % CHUNKS * 8;
      if (column < p.head_dim_v) {
        store_global_16(out + i / CHUNKS * p.out.row + column, {0, 0, 0, 0});
      }
    }
    const FwdBlock& block = work.block;
    float* lse = p.lse + lse_begin(p, block.batch, block.head, work.sequence.q0) + row0();
    if (rank == 0 && thread < existing) {
      lse[thread] = p.sinks == nullptr ? -INFINITY : p.sinks[block.head];
    }
  }
};

template <class Config>
struct FwdSm90Output {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using QTile = typename Config::QPanels;
  static constexpr int NT = Config::HEAD_DIM_V / 8;

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const FwdSm90Work& work;
  const FwdSm90Rows own{params.p, work};

  // Rounds and stores O, through this warpgroup's rows of the output tile if there is one. If the
  // output tile is in Q's memory, Q is released once the store has read the tile.
  __device__ __forceinline__ void store(const Accumulator<1, NT>& o) const {
    if constexpr (Config::OUT_STAGE == OutStage::NONE) {
      store_rows<Target, T>(o, own.first(), params.p.out.row, own.count(), params.p.head_dim_v);
      return;
    }
    const int barrier = ONE_CONSUMER + consumer();
    const bool one_thread = fresh_thread() % WARPGROUP == 0;
    constexpr bool IN_Q = Config::OUT_STAGE == OutStage::QUERIES;
    static_assert(Config::OUT_STAGE != OutStage::OWN || sizeof(smem.out) == Config::OUT_BYTES);
    const uint32_t tile =
        shared_address(IN_Q ? smem.q[0] : smem.out) + consumer() * 64 * QTile::ROW_BYTES;
    // Orders the writes below after all reads of the previous output tile, or of Q.
    if (!IN_Q && one_thread) wait_until_read<0>();
    barrier_sync(barrier, WARPGROUP);
    stage_rows<QTile, Target, T>(o, tile);
    fence_proxy_async();
    barrier_sync(barrier, WARPGROUP);
    const bool packed = params.p.packing.cu_seqlens_q != nullptr;
    if (packed && own.count() < 64) {  // the next document's rows follow
      copy_rows<QTile, NT>(tile, own.first(), params.p.out.row, own.count(), params.p.head_dim_v);
    } else if (one_thread) {
      store_boxes(tile, packed ? 0 : work.block.batch);
    }
    if constexpr (IN_Q) {
      if (one_thread) wait_until_read<0>();
      smem.q_barriers.release(0);
    }
  }

  // Stores the results of queries without a visible key.
  __device__ __forceinline__ void store_empty() const { own.store_empty<Config::HEAD_DIM_V>(); }

 private:
  // Stores one box per panel. The tensor map cuts off rows beyond the end of the tensor.
  __device__ __forceinline__ void store_boxes(uint32_t tile, int batch) const {
    const FwdBlock& block = work.block;
    BoxPlace at{0, work.sequence.q0 + own.row0(), block.head_in_group, block.head_kv, batch};
#pragma unroll
    for (int panel = 0; panel < Config::V_PANELS; ++panel) {
      at.column = panel * QTile::COLUMNS;
      if (own.count() > 0) store_box(params.out, at, tile + panel * QTile::BYTES);
    }
    commit_stores();
  }
};

// Runs a consumer warpgroup until the loader closes the work tiles. consumer.compute(work) computes
// and stores out and lse of a work tile that has queries and keys.
template <class Config, class Consumer>
__device__ __forceinline__ void consume_works(const Consumer& consumer) {
  const typename Config::Params& params = consumer.params;
  typename Config::Smem& smem = consumer.smem;
  Ring<WORKS> works;
#pragma unroll 1
  while (true) {
    smem.work_barriers.wait_for_data(works);
    const typename Config::Work& work = smem.work[works.stage()];
    if (work.is_closed()) break;
    if (work.sequence.uncovered_q) fill_uncovered<Config, 2, WARPGROUP>(params.p, work.block);
    if (work.has_queries()) {
      if (work.has_keys()) {
        consumer.compute(work);
      } else {
        FwdSm90Output<Config>{params, smem, work}.store_empty();
      }
    }
    smem.work_barriers.release(works.stage());
    works.advance();
  }
  wait_until_read<0>();
}

}  // namespace flash_dist

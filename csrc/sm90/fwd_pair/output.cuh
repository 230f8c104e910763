// Stores 64 rows of a block's columns of out, in the forward kernel for pairs of blocks.
#pragma once

#include "core/sequence.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/fwd_pair/config.h"
#include "sm90/rows.cuh"

namespace flash_dist {

template <class Config>
struct FwdPairOutput {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using QTile = typename Config::QTile;
  using OutSlice = Accumulator<1, Config::SLICE / 8>;

  const FwdSm90Params& params;
  typename Config::Smem& smem;
  const int rank;
  const typename Config::Work& work = smem.work;

  // Stores O, rounded, through this warpgroup's rows of Q, which all of its warps have read.
  __device__ __forceinline__ void store(const OutSlice (&o)[Config::V_SLICES]) const {
    const int barrier = ONE_CONSUMER + consumer();
    const uint32_t tile = shared_address(smem.q) + consumer() * 64 * QTile::ROW_BYTES;
    barrier_sync(barrier, WARPGROUP);
#pragma unroll
    for (int i = 0; i < Config::V_SLICES; ++i) {
      stage_rows<QTile, Target, T>(o[i], tile + i * Config::SLICE_PANELS * QTile::BYTES);
    }
    fence_proxy_async();
    barrier_sync(barrier, WARPGROUP);
    const bool packed = params.p.packing.cu_seqlens_q != nullptr;
    if (packed && rows() < 64) {  // the next document's rows follow
      copy_rows<QTile, Config::COLUMNS / 8>(tile, first_row() + column0(), params.p.out.row, rows(),
                                            params.p.head_dim_v - column0());
    } else if (fresh_thread() % WARPGROUP == 0) {
      store_boxes(tile, packed ? 0 : work.block.batch);
      wait_until_read<0>();
    }
  }

  // Stores zeros for queries without a visible key. Block 0 also stores lse: -inf, or the sink.
  __device__ __forceinline__ void store_empty() const {
    const FwdParams& p = params.p;
    constexpr int CHUNKS = Config::COLUMNS / 8;  // chunks of 16 bytes per row
    const int thread = fresh_thread() % WARPGROUP;
    const int count = min(rows(), 64);
    uint16_t* out = first_row();
#pragma unroll 1
    for (int i = thread; i < count * CHUNKS; i += WARPGROUP) {
      const int column = column0() + i % CHUNKS * 8;
      if (column < p.head_dim_v) {
        store_global_16(out + i / CHUNKS * p.out.row + column, {0, 0, 0, 0});
      }
    }
    const FwdBlock& block = work.block;
    float* lse = p.lse + lse_begin(p, block.batch, block.head, work.sequence.q0) + row0();
    if (rank == 0 && thread < count) {
      lse[thread] = p.sinks == nullptr ? -INFINITY : p.sinks[block.head];
    }
  }

 private:
  // row0(): this warpgroup's first row in the sequence. rows(): number of rows from there to the
  // sequence's end. first_row(): address of the first row in out.
  __device__ __forceinline__ int row0() const { return work.block.row0 + consumer() * 64; }
  __device__ __forceinline__ int rows() const { return work.sequence.seqlen_q - row0(); }
  __device__ __forceinline__ uint16_t* first_row() const {
    const View& view = params.p.out;
    const FwdBlock& block = work.block;
    return head_begin(view, block.batch, block.head_kv, block.head_in_group) +
           (work.sequence.q0 + row0()) * view.row;
  }
  __device__ __forceinline__ int column0() const { return rank * Config::COLUMNS; }

  // Stores one box per panel. The tensor map cuts off rows and columns beyond the end of the
  // tensor.
  __device__ __forceinline__ void store_boxes(uint32_t tile, int batch) const {
    const FwdBlock& block = work.block;
    BoxPlace at{column0(), work.sequence.q0 + row0(), block.head_in_group, block.head_kv, batch};
#pragma unroll
    for (int panel = 0; panel < Config::OUT_PANELS; ++panel, at.column += QTile::COLUMNS) {
      if (rows() > 0 && at.column < params.p.head_dim_v) {
        store_box(params.out, at, tile + panel * QTile::BYTES);
      }
    }
    commit_stores();
  }
};

}  // namespace flash_dist

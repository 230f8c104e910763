// Stores 64 rows of a block's columns of out, in the forward kernel for pairs of blocks.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/fwd/output.cuh"
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
  const FwdSm90Rows own{params.p, work};

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
    if (packed && own.count() < 64) {  // the next document's rows follow
      copy_rows<QTile, Config::COLUMNS / 8>(tile, own.first() + column0(), params.p.out.row,
                                            own.count(), params.p.head_dim_v - column0());
    } else if (fresh_thread() % WARPGROUP == 0) {
      store_boxes(tile, packed ? 0 : work.block.batch);
      wait_until_read<0>();
    }
  }

  // Stores the results of queries without a visible key.
  __device__ __forceinline__ void store_empty() const { own.store_empty<Config::COLUMNS>(rank); }

 private:
  __device__ __forceinline__ int column0() const { return rank * Config::COLUMNS; }

  // Stores one box per panel. The tensor map cuts off rows and columns beyond the end of the
  // tensor.
  __device__ __forceinline__ void store_boxes(uint32_t tile, int batch) const {
    const FwdBlock& block = work.block;
    BoxPlace at{column0(), work.sequence.q0 + own.row0(), block.head_in_group, block.head_kv,
                batch};
#pragma unroll
    for (int panel = 0; panel < Config::OUT_PANELS; ++panel, at.column += QTile::COLUMNS) {
      if (own.count() > 0 && at.column < params.p.head_dim_v) {
        store_box(params.out, at, tile + panel * QTile::BYTES);
      }
    }
    commit_stores();
  }
};

}  // namespace flash_dist

// The loading thread of a block of the forward kernel for pairs of blocks.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/fwd_pair/config.h"

namespace flash_dist {

template <class Config>
struct FwdPairLoader {
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;

  const FwdSm90Params& params;
  typename Config::Smem& smem;
  const int rank;
  typename Config::Slices slices;

  // Loads slices of K and V in the order in which the consumers read them.
  __device__ __forceinline__ void run() {
    const StepPairs pairs{smem.work.bounds};
    const int last = pairs.count() - 1;
    load_keys<true>(pairs.step(0, rank));
#pragma unroll 1
    for (int pair = 0; pair <= last; ++pair) {
      if (pair < last) load_keys<false>(pairs.step(pair + 1, rank));
#pragma unroll 1
      for (int i = 0; i < Config::CLUSTER; ++i) load_values(pairs.step(pair, rank ^ i));
    }
  }

 private:
  // Loads K of a step. WITH_Q: also loads Q, slice by slice.
  template <bool WITH_Q>
  __device__ __forceinline__ void load_keys(int step) {
#pragma unroll 1
    for (int i = 0; i < Config::K_SLICES; ++i) {
      if constexpr (WITH_Q) load_queries(i);
      load_slice(params.k, params.k_axes, step, i * Config::SLICE);
    }
  }

  // Loads this block's columns of V of a step.
  __device__ __forceinline__ void load_values(int step) {
#pragma unroll 1
    for (int i = 0; i < Config::V_SLICES; ++i) {
      load_slice(params.v, params.v_axes, step, rank * Config::COLUMNS + i * Config::SLICE);
    }
  }

  __device__ __forceinline__ void load_queries(int slice) const {
    const FwdBlock& block = smem.work.block;
    const uint32_t full = shared_address(&smem.q_full[slice]);
    mbarrier_expect(full, Config::SLICE_PANELS * QTile::BYTES);
    BoxPlace at{slice * Config::SLICE, smem.work.sequence.q0 + block.row0,
                block.head_in_group * params.q_axes.member, block.head_kv * params.q_axes.head_kv,
                block.batch * params.q_axes.batch};
    load_panels<QTile>(shared_address(smem.q) + slice * Config::SLICE_PANELS * QTile::BYTES,
                       params.q, at, full);
  }

  __device__ __forceinline__ void load_slice(const CUtensorMap& map, const AxisSteps& axes,
                                             int step, int column) {
    const FwdBlock& block = smem.work.block;
    const typename Config::Steps steps{smem.work.bounds};
    const int key0 = steps.is_list() ? steps.key0(step, 0) : steps.key0(step);
    const uint32_t full = shared_address(&smem.full[slices.stage]);
    mbarrier_wait(shared_address(&smem.empty[slices.stage]), slices.parity ^ 1);
    mbarrier_expect(full, Config::SLICE_BYTES);
    load_panels<KTile>(shared_address(smem.slices[slices.stage]), map,
                       {column, smem.work.sequence.k0 + key0, 0, block.head_kv * axes.head_kv,
                        block.batch * axes.batch},
                       full);
    slices.advance();
  }

  // Loads one box per panel of a slice.
  template <class Tile>
  __device__ __forceinline__ static void load_panels(uint32_t tile, const CUtensorMap& map,
                                                     BoxPlace at, uint32_t barrier) {
#pragma unroll
    for (int panel = 0; panel < Config::SLICE_PANELS; ++panel, at.column += Tile::COLUMNS) {
      load_box(tile + panel * Tile::BYTES, map, at, barrier);
    }
  }
};

}  // namespace flash_dist

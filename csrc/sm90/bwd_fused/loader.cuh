// The loading thread of a block of the fused backward. It copies K and V, and for each item Q, dO,
// lse, delta and a bias that TMA can load. It describes each item for the warpgroups of keys.
#pragma once

#include "ptx/tensor_copy.cuh"
#include "sm90/bwd/dkdv_steps.cuh"
#include "sm90/bwd_fused/bias.cuh"

namespace flash_dist {

template <class Config>
struct FusedSm90Loader {
  using Cursor = DkdvCursor<Config>;
  using BiasTile = typename Config::BiasTile;
  using Gradients = typename Config::Gradients;
  // True if the bias of an item is fetched into L2 before its stage is free. Measured with 16384
  // keys on an H200, relative to the speed without a bias: at head_dim 128, where the only stage is
  // refilled late, an fp32 bias reaches 0.71 with these fetches. At head_dim 64, it reaches 0.61
  // with them and 0.67 without.
  static constexpr bool PREFETCHES_BIAS = Config::BIAS_IS_FP32 && Config::DS_STAGES == 1;
  // True if a bias that is read only once gets the L2 priority EVICT_FIRST. At head_dim 128 this
  // costs time: 0.57 of the speed without a bias, instead of 0.71.
  static constexpr bool EVICTS_BIAS = Config::BIAS_IS_FP32 && !PREFETCHES_BIAS;

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;
  const DkdvSm90Steps<Config> steps{params, smem};

  // Loads the block's tiles in one thread, and describes each item while its copies are in flight.
  __device__ __forceinline__ void load() const {
    if (work.items == 0) return;
    steps.load_keys();
    FusedCursor<Config> cursor(p, work, 0);
    Ring<Config::STAGES> stages;
#pragma unroll 1
    for (int i = 0; i < work.items; ++i, stages.advance()) {
      const int s = stages.stage();
      smem.barriers.wait_for_place(stages);
      steps.template load_queries<false>(cursor, s);
      describe(smem.item[s], cursor);
      mbarrier_arrive(shared_address(&smem.barriers.full[s]));
      if constexpr (Config::BIAS_IN_BOXES) load_bias(cursor, Gradients{stages.passed});
      cursor.next(p, work);
    }
  }

 private:
  // Loads the bias of the item at the cursor to where the item's dS^T will be.
  __device__ __forceinline__ void load_bias(const Cursor& cursor, const Gradients& place) const {
    const uint32_t full = shared_address(&smem.bias_full[place.stage()]);
    BoxPlace at{work.key0 * Config::BIAS_PANELS, params.bias_rows == 1 ? 0 : cursor.row0(), 0,
                (work.head + cursor.head_in_group) * params.bias_axes.head_kv,
                work.batch * params.bias_axes.batch};
    if constexpr (PREFETCHES_BIAS) prefetch_bias(at);
    smem.wait_for_place(place);
    mbarrier_expect(
        full, Config::CONSUMERS * Config::BIAS_PANELS * params.bias_rows * BiasTile::ROW_BYTES);
#pragma unroll
    for (int half = 0; half < Config::CONSUMERS; ++half)
#pragma unroll
      for (int panel = 0; panel < Config::BIAS_PANELS; ++panel, at.column += BiasTile::COLUMNS) {
        const uint32_t to = smem.bias_tile(half, place) + panel * Config::DS_BYTES;
        if constexpr (EVICTS_BIAS) {
          load_box(to, params.bias, at, full, caching_of_bias(params));
        } else {
          load_box(to, params.bias, at, full);
        }
      }
  }
  // Fetches the bias at `at` into L2, while its stage is still in use.
  __device__ __forceinline__ void prefetch_bias(BoxPlace at) const {
#pragma unroll
    for (int i = 0; i < Config::CONSUMERS * Config::BIAS_PANELS; ++i) {
      prefetch_box(params.bias, at);
      at.column += BiasTile::COLUMNS;
    }
  }

  // Describes the item at the cursor, for the warpgroups of keys.
  __device__ __forceinline__ void describe(FusedItem& item, const Cursor& cursor) const {
    item.row0 = cursor.row0();
    item.head_in_group = cursor.head_in_group;
    const int4* known = cursor.known(p, work);
    if (known != nullptr) item.known = *known;
    item.code[0] = tile_code(p, work, item, 0);
    item.code[1] = tile_code(p, work, item, 1);
  }
};

}  // namespace flash_dist

// The part of dQ that warpgroup 3 of the fused kernel computes: of a query tile and one block's keys,
// on its way to or from the sum over the key blocks.
#pragma once

#include "core/ds_scale.h"
#include "core/sequence.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/bwd/config.h"
#include "sm90/rows.cuh"

namespace flash_dist {

// An item's rows of dQ in global memory.
struct DqRows {
  uint16_t* dq;
  int64_t stride;
  int rows, columns;  // that exist

  __device__ __forceinline__ DqRows(const BwdParams& p, const DkdvSm90Work& work,
                                    const DqItem& item)
      : dq(head_begin(p.dq, work.block.batch, work.block.head_kv, item.head_in_group) +
           static_cast<int64_t>(work.sequence.q0 + item.row0) * p.dq.row),
        stride(p.dq.row),
        rows(work.seqlen_q - item.row0),
        columns(p.head_dim) {}
};

// NT * 8 columns of a warpgroup's product. In a stage, and in the sum in global memory, they lie in
// the order of its registers.
template <int NT>
struct DqPart : Accumulator<1, NT> {
  using Accumulator<1, NT>::x;

  // Address of four neighbouring numbers of this thread.
  __device__ __forceinline__ static uint32_t place(uint32_t stage, int n) {
    return stage + (n * WARPGROUP + fresh_thread() % WARPGROUP) * 16;
  }
  __device__ __forceinline__ void put(uint32_t stage) const {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float (&own)[4] = x[0][n];
      store_shared_16(place(stage, n), {__float_as_uint(own[0]), __float_as_uint(own[1]),
                                        __float_as_uint(own[2]), __float_as_uint(own[3])});
    }
    fence_proxy_async();
  }
  // Adds the sum that the copy engine loaded.
  __device__ __forceinline__ void add(uint32_t stage) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint4 sum = load_shared_16(place(stage, n));
      x[0][n][0] += __uint_as_float(sum.x);
      x[0][n][1] += __uint_as_float(sum.y);
      x[0][n][2] += __uint_as_float(sum.z);
      x[0][n][3] += __uint_as_float(sum.w);
    }
  }
};

// dQ = dS @ K, as many columns at a time as the registers hold.
template <class Config, int COLUMNS = Config::HEAD_DIM == 96 ? 96 : 64>
struct DqSum : DqPart<COLUMNS / 8> {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using KTile = typename Config::KTile;
  using DsTile = typename Config::DsTile;
  using DqTile = typename Config::DqTile;
  static constexpr int PARTS = Config::HEAD_DIM / COLUMNS;
  static constexpr int PART_BYTES = Config::DQ_BYTES / PARTS;
  static_assert(PARTS == 1 || COLUMNS % KTile::COLUMNS == 0, "a part begins with a panel of K");

  // dQ = dS @ K                                           [BLOCK_M, COLUMNS]
  __device__ __forceinline__ void multiply(uint32_t ds, uint32_t keys, int part) {
    const uint64_t a = DsTile::by_columns(ds);
    const uint64_t b = KTile::by_columns(keys + part * KTile::count(COLUMNS) * KTile::BYTES);
    wgmma_fence();
    wgmma<T, true, true, true>(this->x[0], a, b);
#pragma unroll
    for (int k = 1; k < Config::BLOCK_N / 16; ++k) {
      wgmma<T, true, true>(this->x[0], a + DsTile::columns_step(k), b + KTile::columns_step(k));
    }
    wgmma_commit();
    wgmma_wait<0>();
    hold(this->x[0]);
  }

  // Rounded, through the stage.
  __device__ __forceinline__ void finish(uint32_t stage, float scale, const DqRows& to, int part) {
    const int column = part * COLUMNS;
    this->scale(scale);
    // NOTE: two steps: their product would stay in a register throughout the kernel.
    if constexpr (DS_SCALE<T> != 1.0f) this->scale(1.0f / DS_SCALE<T>);
    store_rows<DqTile, Target, T>(*this, stage, to.dq + column, to.stride, to.rows,
                                  to.columns - column);
    // NOTE: the copy engine writes the next sum where these reads were.
    fence_proxy_async();
  }
};

}  // namespace flash_dist

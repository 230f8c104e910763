// The part of dQ that a block of the fused kernel computes, for a query tile and the block's keys,
// and its addition to the sum over all key blocks.
#pragma once

#include "core/ds_scale.h"
#include "core/sequence.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/bwd_fused/config.h"
#include "sm90/rows.cuh"

namespace flash_dist {

// An item's rows of dQ in global memory.
struct DqRows {
  uint16_t* dq;
  int64_t stride;
  int rows, columns;  // number of existing rows and columns

  __device__ __forceinline__ DqRows(const BwdParams& p, const DkdvSm90Work& work,
                                    const DqItem& item)
      : dq(head_begin(p.dq, work.block.batch, work.block.head_kv, item.head_in_group) +
           static_cast<int64_t>(work.sequence.q0 + item.row0) * p.dq.row),
        stride(p.dq.row),
        rows(work.seqlen_q - item.row0),
        columns(p.head_dim) {}
};

// NT * 8 columns of a warpgroup's product. They are stored in the order of its registers, both in a
// stage and in the sum in global memory.
template <int NT>
struct DqPart : Accumulator<1, NT> {
  using Accumulator<1, NT>::x;

  // Returns the address of the four adjacent floats of this thread's x[0][n] in a stage.
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
  }
  // Adds the sum of earlier blocks, which TMA has loaded into the stage.
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

// Computes COLUMNS columns of dQ = dS @ K.
template <class Config, int COLUMNS>
struct DqColumns : DqPart<COLUMNS / 8> {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using KTile = typename Config::KTile;
  using DsTile = typename Config::DsTile;
  using DqTile = typename Config::DqTile;
  static constexpr int BYTES = Config::BLOCK_M * COLUMNS * static_cast<int>(sizeof(float));

  // dQ = dS @ K                                           [BLOCK_M, COLUMNS]
  // keys: the address of the first of the columns in the tile of K.
  __device__ __forceinline__ void issue(uint32_t ds, uint32_t keys) {
    const uint64_t a = DsTile::by_columns(ds);
    const uint64_t b = KTile::by_columns(keys);
    wgmma_fence();
    wgmma<T, true, true, true>(this->x[0], a, b);
#pragma unroll
    for (int k = 1; k < Config::BLOCK_N / 16; ++k) {
      wgmma<T, true, true>(this->x[0], a + DsTile::columns_step(k), b + KTile::columns_step(k));
    }
    wgmma_commit();
  }

  // Scales and rounds the columns, and stores them through the stage to dQ, from `column` on.
  __device__ __forceinline__ void finish(uint32_t stage, float scale, const DqRows& to,
                                         int column) {
    this->scale(scale);
    // NOTE: scales in two steps, because the product of both factors would stay in a register
    // throughout the kernel.
    if constexpr (DS_SCALE<T> != 1.0f) this->scale(1.0f / DS_SCALE<T>);
    store_rows<DqTile, Target, T>(*this, stage, to.dq + column, to.stride, to.rows,
                                  to.columns - column);
    // NOTE: TMA writes the next sum to the memory that store_rows() has read.
    fence_proxy_async();
  }
};

// Computes all columns of dQ, as many at a time as the registers of warpgroup 3 hold.
template <class Config>
struct DqSum : DqColumns<Config, Config::HEAD_DIM == 96 ? 96 : 64> {
  using KTile = typename Config::KTile;
  static constexpr int COLUMNS = Config::HEAD_DIM == 96 ? 96 : 64;
  static constexpr int PARTS = Config::HEAD_DIM / COLUMNS;
  static_assert(PARTS == 1 || COLUMNS % KTile::COLUMNS == 0, "a part begins with a panel of K");

  __device__ __forceinline__ void multiply(uint32_t ds, uint32_t keys, int part) {
    this->issue(ds, keys + part * KTile::count(COLUMNS) * KTile::BYTES);
    wgmma_wait<0>();
    hold(this->x[0]);
  }
};

// The columns of dQ that key warpgroup `half` (0 or 1) computes: those of the first or the last of
// the three panels of K, and half of the middle panel. The functions return where these columns
// begin in dQ, in the tile of K and in a stage.
template <class Config>
struct DqHalf {
  using KTile = typename Config::KTile;
  using Panel = DqColumns<Config, KTile::COLUMNS>;
  using Rest = DqColumns<Config, KTile::COLUMNS / 2>;
  static_assert(!Config::KEYS_MULTIPLY || Config::HEAD_DIM == 3 * KTile::COLUMNS);
  int half;

  __device__ __forceinline__ int panel() const { return half * 2 * KTile::COLUMNS; }
  __device__ __forceinline__ int rest() const { return KTile::COLUMNS * (2 + half) / 2; }
  __device__ __forceinline__ uint32_t panel_of_keys(uint32_t tile) const {
    return tile + half * 2 * KTile::BYTES;
  }
  __device__ __forceinline__ uint32_t rest_of_keys(uint32_t tile) const {
    return tile + KTile::BYTES + half * KTile::ROW_BYTES / 2;
  }
  __device__ __forceinline__ uint32_t panel_of_stage(uint32_t stage) const {
    return stage + half * (Panel::BYTES + Rest::BYTES);
  }
  __device__ __forceinline__ uint32_t rest_of_stage(uint32_t stage) const {
    return panel_of_stage(stage) + Panel::BYTES;
  }
};

}  // namespace flash_dist

// Shared memory of the mma.sync and fp32 backward kernels: addresses of the tiles, and the copies
// of Q, dO, K, V, lse and delta. s is the index of a stage.
#pragma once

#include "core/blocks.cuh"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

// Copies COUNT floats of lse and COUNT of delta into adjacent arrays, 16 bytes per thread.
template <class Target, int COUNT>
struct StatCopy {
  uint4 staged;

  __device__ __forceinline__ void fetch(uint32_t smem, const float* lse, const float* delta) {
    const int i = fresh_thread() * 4;
    if (i >= 2 * COUNT) return;
    const float* src = i < COUNT ? lse + i : delta + (i - COUNT);
    if constexpr (Target::HAS_CP_ASYNC) {
      cp_async_16(smem + i * 4, src, true);
    } else {
      staged = load_global_16(src);
    }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (!Target::HAS_CP_ASYNC) {
      const int i = fresh_thread() * 4;
      if (i < 2 * COUNT) store_shared_16(smem + i * 4, staged);
    }
  }
};

// Shared memory of a block of queries: resident Q and dO, stages of K and V.
template <class Config>
struct DqTiles {
  using Stage = typename Config::Stage;
  uint32_t q, dout, stages;

  __device__ __forceinline__ explicit DqTiles(typename Config::Smem& smem)
      : q(shared_address(smem.q)),
        dout(shared_address(smem.dout)),
        stages(shared_address(&smem.stage[0])) {}

  __device__ __forceinline__ uint32_t k(int s) const {
    return stages + s * static_cast<int>(sizeof(Stage));
  }
  __device__ __forceinline__ uint32_t v(int s) const {
    return k(s) + static_cast<int>(offsetof(Stage, v));
  }
};

// Loads Q and dO of the block's queries.
template <class Config>
__device__ __forceinline__ void load_queries(const BwdParams& p, const DqBlock& block,
                                             const Sequence& sequence,
                                             const DqTiles<Config>& tiles) {
  using E = Element<typename Config::T>;
  const RowSpan rows{0, sequence.seqlen_q - block.row0};
  const int64_t row0 = sequence.q0 + block.row0;
  OperandCopy<Config, Config::BLOCK_M, Config::HEAD_DIM> copy_q;
  copy_q.fetch(tiles.q,
               head_begin<E>(p.q, block.batch, block.head_kv, block.head_in_group) + row0 * p.q.row,
               p.q.row, rows, p.head_dim);
  copy_q.land(tiles.q);
  OperandCopy<Config, Config::BLOCK_M, Config::HEAD_DIM_V> copy_dout;
  copy_dout.fetch(
      tiles.dout,
      head_begin<E>(p.dout, block.batch, block.head_kv, block.head_in_group) + row0 * p.dout.row,
      p.dout.row, rows, p.head_dim_v);
  copy_dout.land(tiles.dout);
}

// The copies of a stage of K and V.
template <class Config>
struct KeyCopies {
  using E = Element<typename Config::T>;
  RowSpan keys;  // the result of Mask::keys_that_exist()
  const E *gK, *gV;
  OperandCopy<Config, Config::BLOCK_N, Config::HEAD_DIM> copy_k;
  OperandCopy<Config, Config::BLOCK_N, Config::HEAD_DIM_V> copy_v;

  __device__ __forceinline__ KeyCopies(const BwdParams& p, const DqBlock& block,
                                       const Sequence& sequence, const RowSpan& exist)
      : keys(exist),
        gK(head_begin<E>(p.k, block.batch, block.head_kv, 0) + sequence.k0 * p.k.row),
        gV(head_begin<E>(p.v, block.batch, block.head_kv, 0) + sequence.k0 * p.v.row) {}

  __device__ __forceinline__ void fetch(const BwdParams& p, const DqTiles<Config>& tiles, int key0,
                                        int s) {
    const RowSpan here{keys.first - key0, keys.end - key0};
    copy_k.fetch(tiles.k(s), gK + key0 * p.k.row, p.k.row, here, p.head_dim);
    copy_v.fetch(tiles.v(s), gV + key0 * p.v.row, p.v.row, here, p.head_dim_v);
  }
  __device__ __forceinline__ void land(const DqTiles<Config>& tiles, int s) {
    copy_k.land(tiles.k(s));
    copy_v.land(tiles.v(s));
  }
};

// Shared memory of a block of keys: resident K and V, stages of Q, dO, lse and delta.
template <class Config>
struct DkdvTiles {
  using Stage = typename Config::Stage;
  uint32_t k, v, stages;

  __device__ __forceinline__ explicit DkdvTiles(typename Config::Smem& smem)
      : k(shared_address(smem.k)),
        v(shared_address(smem.v)),
        stages(shared_address(&smem.stage[0])) {}

  __device__ __forceinline__ uint32_t q(int s) const {
    return stages + s * static_cast<int>(sizeof(Stage));
  }
  __device__ __forceinline__ uint32_t dout(int s) const {
    return q(s) + static_cast<int>(offsetof(Stage, dout));
  }
  __device__ __forceinline__ uint32_t lse(int s) const {
    return q(s) + static_cast<int>(offsetof(Stage, lse_log2));
  }
  __device__ __forceinline__ uint32_t delta(int s) const {
    return q(s) + static_cast<int>(offsetof(Stage, delta));
  }
};

// Loads K and V of the block's keys. keys: the result of Mask::keys_that_exist().
template <class Config>
__device__ __forceinline__ void load_keys(const BwdParams& p, const DkdvBlock& block,
                                          const Sequence& sequence, const RowSpan& keys,
                                          const DkdvTiles<Config>& tiles) {
  using E = Element<typename Config::T>;
  const RowSpan here{keys.first - block.key0, keys.end - block.key0};
  OperandCopy<Config, Config::BLOCK_N, Config::HEAD_DIM> copy_k;
  copy_k.fetch(
      tiles.k,
      head_begin<E>(p.k, block.batch, block.head_kv, 0) + (sequence.k0 + block.key0) * p.k.row,
      p.k.row, here, p.head_dim);
  copy_k.land(tiles.k);
  OperandCopy<Config, Config::BLOCK_N, Config::HEAD_DIM_V> copy_v;
  copy_v.fetch(
      tiles.v,
      head_begin<E>(p.v, block.batch, block.head_kv, 0) + (sequence.k0 + block.key0) * p.v.row,
      p.v.row, here, p.head_dim_v);
  copy_v.land(tiles.v);
}

// The copies of a stage of Q, dO, lse and delta.
template <class Config>
struct QueryCopies {
  OperandCopy<Config, Config::BLOCK_M, Config::HEAD_DIM> copy_q;
  OperandCopy<Config, Config::BLOCK_M, Config::HEAD_DIM_V> copy_dout;
  StatCopy<typename Config::Target, Config::BLOCK_M> copy_stats;

  // Starts the copies for one query head of the group, from query row0 on. rows: the queries that
  // exist, relative to row0. work.q, work.dout and work.statistics point at query 0 of the group's
  // first head. Returns the index of row0 in lse_log2 and delta.
  template <class Work>
  __device__ __forceinline__ int64_t fetch(const BwdParams& p, const Work& work,
                                           const DkdvTiles<Config>& tiles, int row0,
                                           int head_in_group, const RowSpan& rows, int s) {
    copy_q.fetch(tiles.q(s), work.q + head_in_group * p.q.head_group + row0 * p.q.row, p.q.row,
                 rows, p.head_dim);
    copy_dout.fetch(tiles.dout(s),
                    work.dout + head_in_group * p.dout.head_group + row0 * p.dout.row, p.dout.row,
                    rows, p.head_dim_v);
    const int64_t row =
        work.statistics + static_cast<int64_t>(head_in_group) * p.rows_padded + row0;
    copy_stats.fetch(tiles.lse(s), p.lse_log2 + row, p.delta + row);
    return row;
  }
  __device__ __forceinline__ void land(const DkdvTiles<Config>& tiles, int s) {
    copy_q.land(tiles.q(s));
    copy_dout.land(tiles.dout(s));
    copy_stats.land(tiles.lse(s));
  }
};

}  // namespace flash_dist

// Attention of few queries to a cache of latent keys (MLA), on mma.sync. The values are the first
// HEAD_DIM_V columns of the keys, which are read once for both products.
//
// Grid      As mma/decode/kernel.cuh: one block per split of the key blocks of all sequences.
// Block     WARPS warps on 16 rows, the queries of all heads. S: a warp multiplies 16 keys of a
//           tile over part of the columns. It keeps Q of these columns in registers for the whole
//           work tile, and stores its partial sums of S in shared memory. Softmax: every warp adds
//           the partial sums and so has all of S, as fragments of the second product. Warps
//           exchange nothing else. O: a warp has some columns, for all keys.
// Shared    A ring of tiles of K; Q; S.
// Pipeline  Copies to all stages of the ring but one are in flight. Each tile has two barriers:
//           after its copies have landed, and after S is stored.
//
// Each key block of 128 keys has an online softmax over its tiles. Key blocks and groups are
// combined as in mma/decode/kernel.cuh.
#pragma once

#include "core/decode_load.cuh"
#include "core/decode_rows.cuh"
#include "core/decode_work.cuh"
#include "core/softmax.cuh"
#include "mma/mla/config.h"
#include "ptx/barrier.cuh"
#include "ptx/mma.cuh"

namespace flash_dist {

// The warp's part of the product S. keys: index of its 16 keys in a tile, in units of 16 keys.
// columns: index of its part of the columns.
template <class Config>
struct ScorePart {
  int keys, columns;

  __device__ __forceinline__ ScorePart()
      : keys(static_cast<int>(threadIdx.x) / 32 % Config::KEY_PARTS),
        columns(static_cast<int>(threadIdx.x) / 32 / Config::KEY_PARTS) {}
};

// Q of a work tile, as A operands of this warp's part of the columns.
template <class Config>
struct LatentQueries {
  uint32_t steps[Config::STEPS][4];

  // Loads Q into registers, through sQ. All threads must call this, after all of them have finished
  // reading sQ.
  __device__ __forceinline__ void load(const DecodeParams& p, const DecodeCursor& at, uint32_t sQ,
                                       int part) {
    QueryLoader<Config> rows;
    rows.load(p, at);
    rows.store(sQ);
    __syncthreads();
    const uint32_t from = Operand<Config::HEAD_DIM>::a(sQ).at(0, part);
#pragma unroll
    for (int k = 0; k < Config::STEPS; ++k) ldmatrix_x4(steps[k], from + k * Config::LINE * 2);
  }
};

// Stores partial sums of S = Q @ K.T: for the warp's 16 keys, over its part of the columns.
template <class Config>
__device__ __forceinline__ void multiply_scores(typename Config::Scores& scores, uint32_t sK,
                                                const LatentQueries<Config>& q,
                                                const ScorePart<Config>& own) {
  Accumulator<1, 2> s;
  s.clear();
  const uint32_t from = Operand<Config::HEAD_DIM>::b(sK).at(own.keys * 16, own.columns);
#pragma unroll
  for (int k = 0; k < Config::STEPS; ++k) {
    uint32_t keys[4];
    ldmatrix_x4(keys, from + k * Config::LINE * 2);
    mma_m16n8k16<typename Config::Target, typename Config::T>(s.x[0][0], q.steps[k], keys[0],
                                                              keys[1]);
    mma_m16n8k16<typename Config::Target, typename Config::T>(s.x[0][1], q.steps[k], keys[2],
                                                              keys[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float (&x)[4] = s.x[0][n];
    scores.parts[own.columns][own.keys][n][threadIdx.x % 32] = {x[0], x[1], x[2], x[3]};
  }
}

// Returns S of a tile: the partial sums, added in column order.
template <class Config>
__device__ __forceinline__ Accumulator<1, 2 * Config::KEY_PARTS> add_scores(
    const typename Config::Scores& scores) {
  Accumulator<1, 2 * Config::KEY_PARTS> s;
#pragma unroll
  for (int n = 0; n < 2 * Config::KEY_PARTS; ++n) {
    float (&x)[4] = s.x[0][n];
#pragma unroll
    for (int part = 0; part < Config::COLUMN_PARTS; ++part) {
      const float4 y = scores.parts[part][n / 2][n % 2][threadIdx.x % 32];
      const float z[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = part == 0 ? z[e] : __fadd_rn(x[e], z[e]);
    }
  }
  return s;
}

// O += P @ V of a tile, for this warp's columns.
template <class Config, int NT, int OT>
__device__ __forceinline__ void multiply_values(Partial<OT>& key_block, const Accumulator<1, NT>& p,
                                                uint32_t sK, int part) {
  using Keys = Operand<Config::HEAD_DIM>;
  const uint32_t from = Keys::b_trans(sK).at(0, part);
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    uint32_t weights[1][4];
    to_a_operand<typename Config::Target, typename Config::T>(weights, p, k);
#pragma unroll
    for (int n = 0; n < OT; n += 2) {
      uint32_t values[4];
      ldmatrix_x4_trans(values,
                        from + k * 16 * Keys::Layout::ROW_BYTES + n / 2 * Config::WARPS_N * 32);
      mma_m16n8k16<typename Config::Target, typename Config::T>(key_block.out.x[0][n], weights[0],
                                                                values[0], values[1]);
      mma_m16n8k16<typename Config::Target, typename Config::T>(key_block.out.x[0][n + 1],
                                                                weights[0], values[2], values[3]);
    }
  }
}

template <class Config>
__device__ __forceinline__ void mla_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  constexpr int OT = Config::HEAD_DIM_V / 8 / Config::WARPS_N;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const WarpPlace<Config> own;
  const ScorePart<Config> part;

  let_next_start<Target>();
  if (p.packing.cu_seqlens_q != nullptr) fill_uncovered<Config>(p);
  const DecodeSplits<Config::THREADS> splits(p, smem.splits);
  int begin, end;
  DecodeCursor at;
  if (!splits.find_split(p, smem.splits, blockIdx.x, at, begin, end)) return;
  int key_blocks = end - begin;
  if (threadIdx.x == 0) smem.bounds = {begin, end};

  KvRing<Config> ring(p, smem.ring, at, key_blocks);
  ring.fill(p);
  const float scale_log2 = p.scores.scale * LOG2_E;
  LatentQueries<Config> queries;
  Partial<OT> tile, group, key_block;
  TileRows rows(p, at, own);

  bool is_first = true;
#pragma unroll 1
  for (; key_blocks > 0; --key_blocks, at.advance(p)) {
    if (at.key_block == at.extent.first || is_first) {
      is_first = false;
      queries.load(p, at, shared_address(smem.q), part.columns);
      rows = TileRows(p, at, own);
      tile.clear();
      group.clear();
    }
    key_block.clear();
    const int key0 = at.key_block * KEY_BLOCK;
    const bool all_visible = rows.all_visible(key0);
#pragma unroll 1
    for (int i = 0; i < Config::TILES; ++i) {
      // S = Q @ K.T                                      [16, BLOCK_N]
      const uint32_t sK = ring.next(p);
      multiply_scores(smem.scores, sK, queries, part);
      __syncthreads();  // S of all warps is stored; all warps read it before the next ring.next(p)
      auto s = add_scores<Config>(smem.scores);
      if (!all_visible) rows.mask(s, key0 + i * Config::BLOCK_N);
      // P = exp2(S * scale - top), rescale O; O += P @ V [16, HEAD_DIM_V / WARPS_N] per warp
      float keep[2];
      to_weights(s, key_block.top, key_block.sum, keep, scale_log2);
      rescale(key_block.out, keep);
      multiply_values<Config>(key_block, s, sK, own.warp_n);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) key_block.sum[h] = quad_sum(key_block.sum[h]);
    if (!take_key_block(p, splits, at, smem.bounds, own, key_block, group)) continue;
    tile.combine(group);
    if (at.key_block + 1 == at.extent.end) store_result(p, tile, at, own);
    group.clear();
  }
  ring.drain();
}

}  // namespace flash_dist

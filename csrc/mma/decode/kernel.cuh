// Attention of few queries to the keys and values of a cache, on mma.sync.
//
// Grid      One block per split of the key blocks of all sequences (core/decode_work.cuh), at most
//           as many as the GPU holds.
// Block     WARPS warps on BLOCK_ROWS rows. The rows are the queries of all heads of a group, which
//           share one pass over K and V. WARPS_N warps share 16 rows: each has some keys of S, then
//           some columns of O. With more queries a block has more rows; the bits are the same.
// Shared    A ring of tiles of K and V; Q; P.
// Pipeline  Copies to all stages of the ring but one are in flight: tiles of K of a key block, then
//           its tiles of V, then the next key block, also across work tiles.
//
// Each key block has its own softmax. Key blocks are combined into groups, and groups into the
// result of the work tile. If other splits have key blocks of the work tile, this split stores
// partials, which core/decode_combine.h combines in the same order.
#pragma once

#include <type_traits>

#include "core/decode_load.cuh"
#include "core/decode_rows.cuh"
#include "core/decode_work.cuh"
#include "mma/decode/config.h"
#include "mma/decode/rows.cuh"
#include "mma/fragments.cuh"
#include "ptx/barrier.cuh"

namespace flash_dist {

// A thread block and its split. The member functions are in the order in which run() calls them.
// mma/decode/rows.cuh has the steps that depend on whether warps share rows.
template <class Config>
struct DecodeBlock {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  using Splits = typename Config::Splits;
  using Cursor = typename KeyBlockLoader<Config>::Cursor;
  using Queries = QueryLoader<Config>;
  using Rows = std::conditional_t<Config::OWNS_ROWS, OwnedRows<Config>, SharedRows<Config>>;
  using Scores = typename Rows::Scores;
  using Weights = typename Rows::Weights;
  using Sums = typename Rows::Sums;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int WARPS_N = Config::WARPS_N;
  static constexpr int WARP_PARTS = Config::PARTS / WARPS_N;
  static constexpr int KEY_STEPS = Config::BLOCK_N / 16;  // steps of P @ V per tile
  static constexpr int OT = Rows::OT;

  const DecodeParams& p;
  Smem& smem;
  const WarpPlace<Config> own;
  const Splits splits;
  Cursor at;  // the current key block
  KvRing<Config> ring;
  const float scale_log2;
  const Operand<HEAD_DIM> a_q;
  const Rows rows;

  // Prepares the block for its split. at_, loaded: two cursors at the first key block of the split;
  // with KEEPS_CURSORS, two variables in shared memory. key_blocks: the number of key blocks of the
  // split. NOTE: rows is made from own_, not from the member own: otherwise the compiler would keep
  // this object in memory.
  __device__ __forceinline__ DecodeBlock(const DecodeParams& p_, Smem& smem_,
                                         const WarpPlace<Config>& own_, const Splits& splits_,
                                         Cursor at_, Cursor loaded, int key_blocks)
      : p(p_),
        smem(smem_),
        own(own_),
        splits(splits_),
        at(at_),
        ring(p, smem.ring, loaded, key_blocks),
        scale_log2(p.scores.scale * LOG2_E),
        a_q(Operand<HEAD_DIM>::a(shared_address(smem.q) + own.row0 * HEAD_DIM * 2)),
        rows(smem_, own_) {}

  __device__ __forceinline__ void run(int key_blocks) {
    Queries queries;
    if constexpr (!Config::LOADS_LATE) queries.load(p, at);
    ring.fill(p);
    Partial<OT> tile, group, key_block;
    int2 common{};  // keys visible to both rows of the lane
    bool is_first = true;
#pragma unroll 1
    for (; key_blocks > 0; --key_blocks, advance_cursor<Config::KEEPS_CURSORS>(p, at)) {
      // Q, once per work tile [BLOCK_ROWS, HEAD_DIM]
      if (at.key_block == at.extent.first || is_first) {
        is_first = false;
        store_queries(queries);
        common = TileRows(p, at, own).common_keys();
        tile.clear();
        group.clear();
        rows.park(tile);
      }
      if (at.key_block + 1 == at.extent.end && key_blocks > 1) load_next_queries(queries);
      // S = Q @ K.T, soft cap, ALiBi and mask            [OWN_TILES, 16, WARP_KEYS] per warp
      Scores s;
      multiply_keys(s);
      modify_scores(s, common);
      // P = exp2(S * scale - top), row sums              [OWN_TILES, 16, WARP_KEYS] per warp
      Weights weights;
      Sums sums = {};
      to_weights(s, key_block, weights, sums);
      // O = P @ V                                        [16, HEAD_DIM / WARPS_N] per warp
      multiply_values(weights, key_block);
      add_sums(sums, key_block);
      // Combine O with its group, and a complete group with the work tile; or store partials
      if (!take_key_block(p, splits, at, smem.bounds, own, key_block, group)) continue;
      rows.unpark(tile);
      tile.combine(group);
      rows.park(tile);
      if (at.key_block + 1 == at.extent.end) store_result(p, tile, at, own);
      group.clear();
    }
    ring.drain();
    if constexpr (Config::IN_PAIRS) splits.finish(p, own, group);
  }

 private:
  __device__ __forceinline__ void store_queries(Queries& queries) const {
    if constexpr (Config::LOADS_LATE) queries.load(p, at);
    queries.store(shared_address(smem.q));
  }
  // Unless LOADS_LATE, loads the next work tile's queries, during the last key block of this one.
  __device__ __forceinline__ void load_next_queries(Queries& queries) const {
    if constexpr (!Config::LOADS_LATE) {
      DecodeCursor next = at;
      next.advance(p);
      queries.load(p, next);
    }
  }

  __device__ __forceinline__ void multiply_keys(Scores& s) {
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sK = ring.next(p);
      const int own_tile = i / Config::KEY_GROUPS;
      if (i != Config::tile_number(own_tile, own.warp_n)) continue;
      auto& tile = s[own_tile];
      tile.clear();
      const int first = Config::first_of_tile(own.warp_n);
      if constexpr (Config::KEY_TILES == 1) {
        gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, 1, 1>(tile, a_q, Operand<HEAD_DIM>::b_8(sK),
                                                            first);
      } else {
        gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, 1, Config::KEY_TILES>(
            tile, a_q, Operand<HEAD_DIM>::b(sK), first);
      }
    }
  }

  // First key of this warp in its i-th tile of the key block.
  __device__ __forceinline__ int first_key(int i) const {
    return at.key_block * KEY_BLOCK + Config::tile_number(i, own.warp_n) * Config::BLOCK_N +
           Config::first_of_tile(own.warp_n);
  }
  __device__ __forceinline__ void modify_scores(Scores& s, int2 common) const {
    if (p.scores.has_score_mod) {
      const TileScores scores(p, at, own);
#pragma unroll
      for (int i = 0; i < Config::OWN_TILES; ++i) scores.apply_score_mod(s[i], p, first_key(i));
    }
    if (!TileRows::all_visible(common, at.key_block * KEY_BLOCK)) {
      const TileRows rows(p, at, own);
#pragma unroll
      for (int i = 0; i < Config::OWN_TILES; ++i) rows.mask(s[i], first_key(i));
    }
  }

  __device__ __forceinline__ void to_weights(Scores& s, Partial<OT>& key_block, Weights& weights,
                                             Sums& sums) const {
    find_top(s, key_block);
#pragma unroll
    for (int i = 0; i < Config::OWN_TILES; ++i)
#pragma unroll
      for (int n = 0; n < Config::KEY_TILES; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float offset = key_block.top[h] == -INFINITY ? 0.0f : key_block.top[h];
          float& left = s[i].x[0][n][2 * h];
          float& right = s[i].x[0][n][2 * h + 1];
          left = exp2_approx(fmaf(left, scale_log2, -offset));
          right = exp2_approx(fmaf(right, scale_log2, -offset));
          sums[n * WARP_PARTS / Config::KEY_TILES][h] += left + right;
        }
    rows.reduce_sums(sums);
    rows.store_weights(s, weights);
  }
  __device__ __forceinline__ void find_top(const Scores& s, Partial<OT>& key_block) const {
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < Config::OWN_TILES; ++i)
#pragma unroll
      for (int n = 0; n < Config::KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[i].x[0][n][e]);
    rows.reduce_top(top);
#pragma unroll
    for (int h = 0; h < 2; ++h) key_block.top[h] = __fmul_rn(top[h], scale_log2);
  }

  __device__ __forceinline__ void multiply_values(Weights& weights, Partial<OT>& key_block) {
    key_block.out.clear();
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sV = ring.next(p);  // its barrier also waits for P and sums of all warps
      const auto b_v = flash_dist::share(Operand<HEAD_DIM>::b_trans(sV), own.warp_n);
#pragma unroll
      for (int k = 0; k < KEY_STEPS; ++k) {
        gemm_ab_step<Target, T, HEAD_DIM, WARPS_N>(
            key_block.out, rows.load_weights(weights, i * KEY_STEPS + k), b_v, k * 16);
      }
    }
  }
  __device__ __forceinline__ void add_sums(const Sums& sums, Partial<OT>& key_block) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      key_block.sum[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < Config::PARTS; ++i) key_block.sum[h] += rows.sum_of(sums, i, h);
    }
  }
};

template <class Config>
__device__ __forceinline__ void decode_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const WarpPlace<Config> own;

  let_next_start<Target>();
  if (p.packing.cu_seqlens_q != nullptr && !p.few_alone) fill_uncovered<Config>(p);
  const DecodeSplits<Config::THREADS> splits(p, smem.splits);
  int begin, end;
  DecodeCursor first;
  if (!splits.find_split(p, smem.splits, blockIdx.x, first, begin, end)) return;
  if (threadIdx.x == 0) smem.bounds = {begin, end};

  if constexpr (Config::KEEPS_CURSORS) {
    auto& kept = smem.cursors[threadIdx.x / 32];
    set_cursor(kept.computed, first);
    set_cursor(kept.loaded, first);
    DecodeBlock<Config>(p, smem, own, splits, kept.computed, kept.loaded, end - begin)
        .run(end - begin);
  } else {
    DecodeBlock<Config>(p, smem, own, splits, first, first, end - begin).run(end - begin);
  }
}

}  // namespace flash_dist

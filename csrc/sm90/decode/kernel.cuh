// Attention of many rows to the keys and values of a cache, on wgmma: the results of
// mma/decode/kernel.cuh, bit by bit.
//
// Grid      as many blocks as the GPU holds, each with a share of the key blocks of all sequences
//           (core/decode_work.cuh).
// Block     one or two warpgroups of 64 rows of a tile each, which share the keys, and one that loads.
// Shared    a ring of tiles of K and V, Q, what there is of the tile.
// Pipeline  A key block's keys, then its values, then the next key block's, of whatever tile. A tile is
//           announced by a barrier when its copies are in, and given back by another.
//
//   issue S = Q @ K(0).T
//   for each key block u of a tile:
//     wait for S; bend it, hide; P = exp2(S - top), sums
//     issue O = P @ V(u), in pieces of 64 columns
//     combine each piece into the group while the next one, or S = Q @ K(u + 1).T, is under way
//
// Both matrix instructions add up in the same order, over the same k, to the same bits; everything else
// is computed as there: a key block has a softmax of its own, from nothing, whose sums are formed in the
// same parts.
#pragma once

#include <type_traits>

#include "core/decode_load.cuh"
#include "core/decode_rows.cuh"
#include "core/decode_scores.cuh"
#include "core/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/dependents.cuh"
#include "ptx/registers.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/decode/config.h"

namespace flash_dist {

// Which of a tile's rows and columns are this thread's, of a consumer.
template <class Config_>
struct ConsumerPlace {
  using Config = Config_;

  __device__ __forceinline__ static int number() {
    return static_cast<int>(threadIdx.x) / WARPGROUP;
  }
  // The two rows that this lane holds, h = 0 or 1.
  __device__ __forceinline__ static int row(int h) {
    return static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h;
  }
  // The first of two neighbouring columns of O that it holds in x[0][n].
  __device__ __forceinline__ static int column(int n) {
    return n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  }
  // Whether it is the one that writes statistics of rows.
  __device__ __forceinline__ static bool speaks() { return threadIdx.x % 4 == 0; }
};

template <class Config>
struct DecodeSm90Consumer {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Splits = typename Config::Splits;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  static constexpr int STAGES = Config::STAGES;
  static constexpr int KEY_STEPS = KEY_BLOCK / 16;  // of P @ V
  static constexpr int KEY_TILES = KEY_BLOCK / 8;   // columns of S, by 8
  static constexpr int PIECE_TILES = Config::PIECE / 8;
  static constexpr int OT = Config::HEAD_DIM_V / 8;
  using Scores = Accumulator<1, KEY_TILES>;
  using Weights = uint32_t[KEY_STEPS][1][4];  // A operands of P @ V
  using Piece = Accumulator<1, PIECE_TILES>;  // of O of a key block

  const DecodeParams& p;
  typename Config::Smem& smem;
  const ConsumerPlace<Config> own{};
  Ring<STAGES> tiles;  // those that products were issued with

  __device__ __forceinline__ DecodeSm90Consumer(const DecodeParams& p_,
                                                typename Config::Smem& smem_)
      : p(p_), smem(smem_) {}

  // All key blocks of the block's share, of which the cursors are at the first.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (cursor().position < smem.bounds.end) {
      load_queries();
      const int2 clear = clear_keys();
      int key_block = cursor().key_block;
      int stop = stop_of(cursor());
      Partial<OT> group;
      group.clear();
      Scores s;
      issue_scores(s);
#pragma unroll 1
      for (; key_block + 1 < end(); ++key_block) {
        add_key_block(s, group, key_block, clear, stop, std::false_type{});
      }
      add_key_block(s, group, key_block, clear, stop, std::true_type{});
      advance(key_block);
    }
  }

 private:
  static_assert(Config::PIECES <= 2, "all pieces but the last end with one product behind them");

  // Where this warp is: at a key block of the tile. It is looked at where a tile or a group ends; in shared
  // memory it takes no registers meanwhile.
  __device__ __forceinline__ DecodeCursor& cursor() const { return smem.cursors[threadIdx.x / 32]; }
  // Behind the last key block of its tile that is the block's.
  __device__ __forceinline__ int end() const {
    const DecodeCursor& at = cursor();
    return min(at.key_block + (smem.bounds.end - at.position), at.extent.end);
  }
  __device__ __forceinline__ DecodeCursor cursor_at(int key_block) const {
    DecodeCursor at = cursor();
    at.position += key_block - at.key_block;
    at.key_block = key_block;
    return at;
  }
  // Behind the last key block of a tile.
  __device__ __forceinline__ void advance(int key_block) const {
    DecodeCursor at = cursor_at(key_block);
    at.advance(p);
    set_cursor(cursor(), at);
  }

  // The keys of which this warp's rows hide none.
  __device__ __forceinline__ int2 clear_keys() const {
    const int2 own_keys = TileRows(p, cursor(), own).clear();
    return {__reduce_max_sync(0xffffffffu, own_keys.x), __reduce_min_sync(0xffffffffu, own_keys.y)};
  }

  // A key block whose scores are under way. stop: behind the key block at which the group is taken.
  template <class IsLast>
  __device__ __forceinline__ void add_key_block(Scores& s, Partial<OT>& group, int key_block,
                                                int2 clear, int& stop, IsLast) {
    constexpr int LAST = Config::PIECES - 1;
    Combine combines[2] = {Combine(0.0f, 0.0f), Combine(0.0f, 0.0f)};
    Weights weights;
    Piece out[Config::PIECES];
    await_scores(s);
    to_weights(s, key_block * KEY_BLOCK, clear, group, combines, weights);
    issue_values(out, weights);
    scale_group(group, combines);
#pragma unroll
    for (int i = 0; i < LAST; ++i) {
      wgmma_wait<1>();
      hold(out[i].x[0]);
      add_piece(group, out[i], combines, i);
    }
    wgmma_wait<0>();
    hold(out[LAST].x[0]);
    hold(weights);
    release_tile();
    if constexpr (!IsLast::value) issue_scores(s);
    add_piece(group, out[LAST], combines, LAST);
    if (key_block + 1 < stop) return;
    const DecodeCursor at = cursor_at(key_block);
    take_group(at, group);
    group.clear();
    if constexpr (!IsLast::value) stop = stop_of(cursor_at(key_block + 1));
  }

  // Queries of a tile, by the warpgroup whose rows they are. Rows that do not exist are zeros.
  __device__ __forceinline__ void load_queries() const {
    const DecodeCursor at = cursor();
    constexpr int CHUNKS = Config::Layout::CHUNKS;
    const uint32_t sQ = shared_address(smem.q[own.number()]);
    const int head = at.head;
    const int row0 = at.row0(p) + own.number() * Config::CONSUMER_ROWS;
    wait_for_warps();  // the products with those before have been waited for
#pragma unroll 4
    for (int i = threadIdx.x % WARPGROUP; i < Config::CONSUMER_ROWS * CHUNKS; i += WARPGROUP) {
      const int row = row0 + i / CHUNKS, chunk = i % CHUNKS;
      const int query = divide(row, p.by_group);
      const bool exists = row < at.extent.rows(p) && chunk * 8 < p.head_dim;
      const uint16_t* src = head_begin(p.q, at.batch, head, row - query * p.group) +
                            (at.extent.q0 + query) * p.q.row + chunk * 8;
      cp_async_16(sQ + QTile::offset(i / CHUNKS, chunk),
                  exists ? src : static_cast<const uint16_t*>(p.q.data), exists);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();  // wgmma reads what was copied
    wait_for_warps();
  }
  // Of this warpgroup.
  __device__ __forceinline__ void wait_for_warps() const {
    barrier_sync(1 + own.number(), WARPGROUP);
  }

  // The next tile is in.
  __device__ __forceinline__ uint32_t await_tile() {
    smem.barriers.wait_for_data(tiles);
    fence_proxy_async();  // wgmma reads what was copied
    const uint32_t tile = uniform(shared_address(smem.ring[tiles.stage()]));
    tiles.advance();
    return tile;
  }
  // That of the last product, which has been waited for.
  __device__ __forceinline__ void release_tile() const {
    smem.barriers.release((tiles.passed - 1) % STAGES);
  }

  // S = Q @ K.T                                             [64, KEY_BLOCK]
  __device__ __forceinline__ void issue_scores(Scores& s) {
    const uint64_t a_q = QTile::by_rows(uniform(shared_address(smem.q[own.number()])));
    const uint64_t b_k = KTile::by_rows(await_tile());
    wgmma_fence();
    wgmma<T, false, false, true>(s.x[0], a_q, b_k);
#pragma unroll
    for (int k = 1; k < Config::HEAD_DIM / 16; ++k) {
      wgmma<T, false, false>(s.x[0], a_q + QTile::rows_step(k), b_k + KTile::rows_step(k));
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void await_scores(Scores& s) const {
    wgmma_wait<0>();
    hold(s.x[0]);
    release_tile();
  }

  // Soft cap and ALiBi; hidden scores are -inf; then P = exp2(S * scale - top), summed and rounded. Top
  // and sum of the rows join those of the group, whose O is to follow by `combines`.
  __device__ __forceinline__ void to_weights(Scores& s, int key0, int2 clear, Partial<OT>& group,
                                             Combine (&combines)[2], Weights& weights) const {
    const float scale_log2 = p.scores.scale * LOG2_E;
    if (p.scores.bends) {
      const TileScores scores(p, cursor(), own);
      scores.bend(s, p, key0);
    }
    const bool all_see = clear.x <= key0 && key0 + KEY_BLOCK <= clear.y;
    if (!all_see) TileRows(p, cursor(), own).hide(s, key0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        top = fmaxf(fmaxf(top, s.x[0][n][2 * h]), s.x[0][n][2 * h + 1]);
      }
      top = __fmul_rn(quad_max(top), scale_log2);
      const float sum = sum_weights(s, h, scale_log2, top == -INFINITY ? 0.0f : top);
      combines[h] = Combine(group.top[h], top);
      group.top[h] = combines[h].top;
      group.sum[h] = combines[h](group.sum[h], sum);
    }
#pragma unroll
    for (int k = 0; k < KEY_STEPS; ++k) to_a_operand<Target, T>(weights[k], s, k);
  }
  // S -> P of one of a lane's rows, and its sum over the key block: in parts, as others add them up.
  __device__ __forceinline__ static float sum_weights(Scores& s, int h, float scale_log2,
                                                      float offset) {
    constexpr int PART_TILES = Config::SUMMED_KEYS / Config::PARTS / 8;
    float sums[Config::PARTS] = {};
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
      float& left = s.x[0][n][2 * h];
      float& right = s.x[0][n][2 * h + 1];
      left = exp2_approx(fmaf(left, scale_log2, -offset));
      right = exp2_approx(fmaf(right, scale_log2, -offset));
      sums[n / PART_TILES % Config::PARTS] += left + right;
    }
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Config::PARTS; ++i) sum += quad_sum(sums[i]);
    return sum;
  }

  // O = P @ V                                               [64, PIECE] of each piece
  __device__ __forceinline__ void issue_values(Piece (&out)[Config::PIECES], Weights& weights) {
    const uint64_t b_v = KTile::by_columns(await_tile());
    hold(weights);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::PIECES; ++i) {
      const uint64_t piece = b_v + i * (KTile::BYTES >> 4);
      wgmma<T, true, true>(out[i].x[0], weights[0][0], piece);
#pragma unroll
      for (int k = 1; k < KEY_STEPS; ++k) {
        wgmma<T, true>(out[i].x[0], weights[k][0], piece + KTile::columns_step(k));
      }
      wgmma_commit();
    }
  }

  // What Combine does to the group, while the products of the key block are under way; and the key block's columns.
  __device__ __forceinline__ static void scale_group(Partial<OT>& group,
                                                     const Combine (&combines)[2]) {
#pragma unroll
    for (int n = 0; n < OT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = group.out.x[0][n][e];
        x = __fmul_rn(x, combines[e / 2].keep);
      }
  }
  __device__ __forceinline__ static void add_piece(Partial<OT>& group, const Piece& key_block,
                                                   const Combine (&combines)[2], int piece) {
#pragma unroll
    for (int n = 0; n < PIECE_TILES; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = group.out.x[0][piece * PIECE_TILES + n][e];
        x = __fmaf_rn(key_block.x[0][n][e], combines[e / 2].add, x);
      }
  }

  // Whether other blocks have key blocks of the group, too.
  __device__ __forceinline__ bool is_shared(const DecodeCursor& at) const {
    return !smem.bounds.owns_tile(at) && smem.bounds.cuts_group(at);
  }
  // Where the key blocks end that are put together here: with their group, or, where that is shared, each.
  __device__ __forceinline__ int stop_of(const DecodeCursor& at) const {
    return at.key_block + (is_shared(at) ? 1 : at.group_end() - at.position);
  }

  // Such key blocks are complete: into the tile, or to memory.
  __device__ __forceinline__ void take_group(const DecodeCursor& at, Partial<OT>& group) const {
    const Splits& splits = smem.all;
    if (is_shared(at)) {
      store_partial(p, group, splits.key_block_partial(p, at) + at.key_block % GROUP_BLOCKS, own);
    } else if (!smem.bounds.owns_tile(at)) {
      store_partial(p, group, splits.group_partial(p, at, blockIdx.x), own);
    } else {
      combine_parked(group, at.group_begin() == at.tile_begin());
      if (at.position + 1 < at.tile_end()) {
        park(group);
      } else {
        store_result(p, group, at, own);
      }
    }
  }

  // What a thread has of a tile, out of the way; and a group behind it.
  __device__ __forceinline__ void park(const Partial<OT>& tile) const {
    float4* parked = &smem.parked[0][threadIdx.x];
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float (&x)[4] = tile.out.x[0][n];
      parked[n * Config::CONSUMER_THREADS] = {x[0], x[1], x[2], x[3]};
    }
    if (own.speaks()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) smem.parked_stats[own.row(h)] = {tile.top[h], tile.sum[h]};
    }
    __syncwarp();  // all lanes of a row read what one has written
  }
  __device__ __forceinline__ void combine_parked(Partial<OT>& group, bool is_first) const {
    const float4* parked = &smem.parked[0][threadIdx.x];
    Combine combines[2] = {Combine(0.0f, 0.0f), Combine(0.0f, 0.0f)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 stats = is_first ? float2{-INFINITY, 0.0f} : smem.parked_stats[own.row(h)];
      combines[h] = Combine(stats.x, group.top[h]);
      group.top[h] = combines[h].top;
      group.sum[h] = combines[h](stats.y, group.sum[h]);
    }
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float4 tile =
          is_first ? float4{0.0f, 0.0f, 0.0f, 0.0f} : parked[n * Config::CONSUMER_THREADS];
      float (&x)[4] = group.out.x[0][n];
      x[0] = combines[0](tile.x, x[0]), x[1] = combines[0](tile.y, x[1]);
      x[2] = combines[1](tile.z, x[2]), x[3] = combines[1](tile.w, x[3]);
    }
    __syncwarp();  // before one lane writes anew
  }
};

// Starts the copies of all tiles of a share, each when there is a place for it.
template <class Config>
__device__ __forceinline__ void load_split(const DecodeParams& p, typename Config::Smem& smem,
                                           const DecodeCursor& at) {
  int key_blocks = smem.bounds.end - at.position;
  KeyBlockLoader<Config> loader(p, at, key_blocks);
  Ring<Config::STAGES> ring;
#pragma unroll 1
  for (; key_blocks > 0; --key_blocks) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {  // K and V
      smem.barriers.wait_for_place(ring);
      loader.fetch(p, shared_address(smem.ring[ring.stage()]));
      mbarrier_arrive_behind_copies(smem.barriers.data(ring));
      ring.advance();
    }
  }
}

template <class Config>
__device__ __forceinline__ void decode_sm90_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  let_next_start<Target>();
  if (p.packing.cu_seqlens_q != nullptr && !p.few_alone) fill_uncovered<Config>(p);
  const typename Config::Splits splits(p, smem.splits);
  int begin, end;
  DecodeCursor at;
  if (!splits.find_split(p, smem.splits, blockIdx.x, at, begin, end)) return;
  if (threadIdx.x == 0) {
    smem.bounds = {begin, end};
    smem.all = splits;
    smem.barriers.make(Config::CONSUMER_THREADS / 32, Config::LOADERS);
    mbarriers_made();
  }
  if (threadIdx.x < Config::CONSUMER_THREADS / 32) smem.cursors[threadIdx.x] = at;
  __syncthreads();

  if (threadIdx.x < Config::CONSUMER_THREADS) {
    take_registers<Config::CONSUMER_REGISTERS>();
    DecodeSm90Consumer<Config>(p, smem).run();
  } else {
    give_registers<Config::LOADER_REGISTERS>();
    load_split<Config>(p, smem, smem.cursors[0]);
  }
}

}  // namespace flash_dist

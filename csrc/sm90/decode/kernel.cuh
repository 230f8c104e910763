// Attention of many rows to the keys and values of a cache, with wgmma. Results are bit-identical
// to mma/decode/kernel.cuh.
//
// Grid      One block per split of the key blocks of all sequences (core/decode_work.cuh), at most
//           as many as the GPU holds.
// Block     One or two consumer warpgroups with 64 rows of a work tile each, on the same keys, and
//           a loading warpgroup.
// Shared    A ring of tiles of K and V; Q; O of the work tile.
// Pipeline  K of a key block, then its V, then the next key block, also across work tiles. One
//           barrier per stage says that its copies have landed, another that it was read.
//
//   issue S = Q @ K(0).T
//   for each key block n of a work tile:
//     wait for S; soft cap, ALiBi, mask; P = exp2(S - top), sums
//     issue O = P @ V(n), in pieces of 64 columns
//     combine each piece with the group while the next one, or S = Q @ K(n + 1).T, is in flight
//
// wgmma and mma.sync add in the same order over the same k, so their bits agree. Everything else is
// computed as in mma/decode: each key block has its own softmax, with sums over the same parts. Key
// blocks are combined into groups, and groups into the work tile.
#pragma once

#include <type_traits>

#include "core/decode_load.cuh"
#include "core/decode_rows.cuh"
#include "core/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/decode/config.h"

namespace flash_dist {

// Maps the accumulators of a consumer thread to rows and columns of the work tile.
template <class Config_>
struct ConsumerPlace {
  using Config = Config_;

  __device__ __forceinline__ static int number() {
    return static_cast<int>(threadIdx.x) / WARPGROUP;
  }
  // Returns the first or second row of this lane (h = 0 or 1).
  __device__ __forceinline__ static int row(int h) {
    return static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * h;
  }
  // Returns the first of the two adjacent columns of O in x[0][n].
  __device__ __forceinline__ static int column(int n) {
    return n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  }
  // True if this lane writes top and sum of its rows.
  __device__ __forceinline__ static bool writes_stats() { return threadIdx.x % 4 == 0; }
};

template <class Config>
struct DecodeSm90Consumer {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Splits = typename Config::Splits;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  static constexpr int STAGES = Config::STAGES;
  static constexpr int KEY_STEPS = KEY_BLOCK / 16;  // steps of P @ V
  static constexpr int KEY_TILES = KEY_BLOCK / 8;   // 8-column tiles of S
  static constexpr int PIECE_TILES = Config::PIECE / 8;
  static constexpr int OT = Config::HEAD_DIM_V / 8;
  using Scores = Accumulator<1, KEY_TILES>;
  using Weights = uint32_t[KEY_STEPS][1][4];  // A operands of P @ V
  using Piece = Accumulator<1, PIECE_TILES>;  // part of O of a key block

  const DecodeParams& p;
  typename Config::Smem& smem;
  const ConsumerPlace<Config> own{};
  Ring<STAGES> tiles;  // the next tile of K or V to multiply

  __device__ __forceinline__ DecodeSm90Consumer(const DecodeParams& p_,
                                                typename Config::Smem& smem_)
      : p(p_), smem(smem_) {}

  // Computes all key blocks of the split, from the warp's cursor on.
  __device__ __forceinline__ void run() {
#pragma unroll 1
    while (cursor().position < smem.bounds.end) {
      load_queries();
      const int2 common = common_keys();
      int key_block = cursor().key_block;
      int stop = stop_of(cursor());
      Partial<OT> group;
      group.clear();
      Scores s;
      issue_scores(s);
#pragma unroll 1
      for (; key_block + 1 < end(); ++key_block) {
        add_key_block(s, group, key_block, common, stop, std::false_type{});
      }
      add_key_block(s, group, key_block, common, stop, std::true_type{});
      advance(key_block);
    }
  }

 private:
  static_assert(Config::PIECES <= 2, "all pieces but the last end with one product behind them");

  // Returns the warp's cursor, at a key block of the work tile. It is in shared memory, because it
  // is only read at the end of a work tile or group.
  __device__ __forceinline__ DecodeCursor& cursor() const { return smem.cursors[threadIdx.x / 32]; }
  // Returns the end of the work tile's key blocks in this split.
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
  // Moves the cursor past key_block, the last one of its work tile.
  __device__ __forceinline__ void advance(int key_block) const {
    DecodeCursor at = cursor_at(key_block);
    at.advance(p);
    set_cursor(cursor(), at);
  }

  // Returns the range [x, y) of the keys visible to all rows of this warp.
  __device__ __forceinline__ int2 common_keys() const {
    const int2 own_keys = TileRows(p, cursor(), own).common_keys();
    return {__reduce_max_sync(0xffffffffu, own_keys.x), __reduce_min_sync(0xffffffffu, own_keys.y)};
  }

  // Adds a key block, whose scores have been issued, to the group. stop: end of the group's key
  // blocks. At the end of the group, it is set to the end of the next group.
  template <class IsLast>
  __device__ __forceinline__ void add_key_block(Scores& s, Partial<OT>& group, int key_block,
                                                int2 common, int& stop, IsLast) {
    constexpr int LAST = Config::PIECES - 1;
    Combine combines[2] = {Combine(0.0f, 0.0f), Combine(0.0f, 0.0f)};
    Weights weights;
    Piece out[Config::PIECES];
    await_scores(s);
    to_weights(s, key_block * KEY_BLOCK, common, group, combines, weights);
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

  // Loads the queries of a work tile; each warpgroup loads its rows. Rows that do not exist become
  // zeros.
  __device__ __forceinline__ void load_queries() const {
    const DecodeCursor at = cursor();
    constexpr int CHUNKS = Config::Layout::CHUNKS;
    const uint32_t sQ = shared_address(smem.q[own.number()]);
    const int head = at.head;
    const int row0 = at.row0(p) + own.number() * Config::CONSUMER_ROWS;
    wait_for_warps();  // products with the previous queries are complete
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
    fence_proxy_async();  // wgmma reads the copied rows
    wait_for_warps();
  }
  // Waits for all warps of this warpgroup.
  __device__ __forceinline__ void wait_for_warps() const {
    barrier_sync(1 + own.number(), WARPGROUP);
  }

  // Waits for the next tile of K or V, and returns its address.
  __device__ __forceinline__ uint32_t await_tile() {
    smem.barriers.wait_for_data(tiles);
    fence_proxy_async();  // wgmma reads the copied tile
    const uint32_t tile = uniform(shared_address(smem.ring[tiles.stage()]));
    tiles.advance();
    return tile;
  }
  // Releases the tile of the last product, which must be complete.
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

  // Applies soft cap and ALiBi, and sets masked scores to -inf. Converts S to P = exp2(S * scale -
  // top), sums P and rounds it. Combines top and sum with those of the group. combines: receives
  // the factors for O.
  __device__ __forceinline__ void to_weights(Scores& s, int key0, int2 common, Partial<OT>& group,
                                             Combine (&combines)[2], Weights& weights) const {
    const float scale_log2 = p.scores.scale * LOG2_E;
    if (p.scores.has_score_mod) {
      const TileScores scores(p, cursor(), own);
      scores.apply_score_mod(s, p, key0);
    }
    const bool all_visible = common.x <= key0 && key0 + KEY_BLOCK <= common.y;
    if (!all_visible) TileRows(p, cursor(), own).mask(s, key0);
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
  // Converts S to P for one row of a lane. Returns the sum of P over the key block, added in the
  // same parts as in mma/decode.
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

  // Combines a key block with the group in two steps: scale_group() while the products are in
  // flight, then add_piece() for the columns of each product.
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

  // True if other splits also have key blocks of this group.
  __device__ __forceinline__ bool is_shared(const DecodeCursor& at) const {
    return !smem.bounds.owns_tile(at) && smem.bounds.cuts_group(at);
  }
  // Returns the end of the key blocks to combine: the end of the group, or of a single key block if
  // splits share the group.
  __device__ __forceinline__ int stop_of(const DecodeCursor& at) const {
    return at.key_block + (is_shared(at) ? 1 : at.group_end() - at.position);
  }

  // Combines `group` with the work tile, or stores it as a partial. `group` is a complete group, or
  // a single key block if splits share the group.
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

  // Stores O, top and sum of the work tile to shared memory. combine_parked() combines them with
  // the next group.
  __device__ __forceinline__ void park(const Partial<OT>& tile) const {
    float4* parked = &smem.parked[0][threadIdx.x];
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float (&x)[4] = tile.out.x[0][n];
      parked[n * Config::CONSUMER_THREADS] = {x[0], x[1], x[2], x[3]};
    }
    if (own.writes_stats()) {
#pragma unroll
      for (int h = 0; h < 2; ++h) smem.parked_stats[own.row(h)] = {tile.top[h], tile.sum[h]};
    }
    __syncwarp();  // the four lanes of a row read what one of them has written
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
    __syncwarp();  // all lanes have read before a lane writes again
  }
};

// Starts the copies of all tiles of a split, each when its stage is free.
template <class Config>
__device__ __forceinline__ void load_split(const DecodeParams& p, typename Config::Smem& smem,
                                           const DecodeCursor& at) {
  int key_blocks = smem.bounds.end - at.position;
  KeyBlockLoader<Config> loader(p, at, key_blocks);
  Ring<Config::STAGES> ring;
#pragma unroll 1
  for (; key_blocks > 0; --key_blocks) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {  // first K, then V
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

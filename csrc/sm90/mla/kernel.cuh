// Attention of many heads to a cache of latent keys (MLA), on wgmma: the values are the first
// HEAD_DIM_V columns of the keys, which are read once for both products.
//
// Grid      as many blocks as the GPU holds, each with a share of the units of all sequences
//           (core/decode_work.cuh), in whole parts of 4 units.
// Block     two warpgroups on 64 rows, queries of all heads. The first one computes S and P of a tile
//           of 64 keys and hands P to the second, thread by thread: both have the same rows. Each has
//           half of the columns of O. The second one copies the next tile while it waits for P.
// Shared    two tiles of K and one of Q, in panels; P.
// Pipeline  the next tile is on its way while one is computed. Two barriers to a tile: it is there, and
//           P is.
//
// O of 64 rows fills the registers: there is no place for that of a unit beside that of a group. So a
// part of 512 keys has a softmax of its own, from nothing, in which its tiles follow each other, and
// is never cut. What a block has of its group and task before rests in memory meanwhile, or L2.
#pragma once

#include "core/decode_load.cuh"
#include "core/decode_rows.cuh"
#include "core/latent.cuh"
#include "ptx/dependents.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/mla/config.h"

namespace flash_dist {

// Which of a task's rows and columns are this thread's: as the accumulators of a warpgroup have them.
template <class Config_>
struct WarpgroupPlace {
  using Config = Config_;
  int part;  // number of the warpgroup, the same for a warp

  __device__ __forceinline__ WarpgroupPlace()
      : part(static_cast<int>(uniform(threadIdx.x / Config::WARPGROUP))) {}
  // The two rows that this lane holds, h = 0 or 1.
  __device__ __forceinline__ int row(int h) const {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 +
           8 * h;
  }
  // The first of two neighbouring columns of O that it holds in x[0][n].
  __device__ __forceinline__ int column(int n) const {
    return part * Config::COLUMNS + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  }
  // Whether it is the one that writes statistics of rows.
  __device__ __forceinline__ bool speaks() const { return part == 0 && threadIdx.x % 4 == 0; }
  __device__ __forceinline__ int thread() const { return threadIdx.x % Config::WARPGROUP; }
};

// Starts the copies of a task's queries. Rows that do not exist are zeros.
template <class Config>
__device__ __forceinline__ void fetch_queries(const DecodeParams& p, const DecodeCursor& at,
                                              uint32_t sQ) {
  using Layout = typename Config::Layout;
  const int head = at.head(p);
  const int row0 = at.tile(p) * Config::TASK_ROWS;
#pragma unroll 1
  for (int i = threadIdx.x; i < Config::TASK_ROWS * Layout::CHUNKS; i += Config::THREADS) {
    const int row = row0 + i / Layout::CHUNKS, chunk = i % Layout::CHUNKS;
    const int query = divide(row, p.by_group);
    const bool exists = row < at.extent.rows(p) && chunk * 8 < p.head_dim;
    const uint16_t* src = head_begin(p.q, at.batch, head, row - query * p.group) +
                          (at.extent.q0 + query) * p.q.row + chunk * 8;
    cp_async_16(sQ + Layout::offset(i / Layout::CHUNKS, chunk),
                exists ? src : static_cast<const uint16_t*>(p.q.data), exists);
  }
  cp_async_commit();
}

// S = Q @ K.T                                             [64, BLOCK_N], by one warpgroup
template <class Config>
__device__ __forceinline__ void multiply_keys(Accumulator<1, Config::BLOCK_N / 8>& s, uint32_t sQ,
                                              uint32_t sK) {
  using T = typename Config::T;
  using Tile = typename Config::Tile;
  const uint64_t a_q = Tile::by_rows(uniform(sQ));
  const uint64_t b_k = Tile::by_rows(uniform(sK));
  wgmma_fence();
  wgmma<T, false, false, true>(s.x[0], a_q, b_k);
#pragma unroll
  for (int k = 1; k < Config::HEAD_DIM / 16; ++k) {
    wgmma<T, false, false>(s.x[0], a_q + Tile::rows_step(k), b_k + Tile::rows_step(k));
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(s.x[0]);
}

// O += P @ V                                              [64, COLUMNS], by each warpgroup
template <class Config, int OT, int KT>
__device__ __forceinline__ void multiply_values(Accumulator<1, OT>& out, uint32_t (&p)[KT][1][4],
                                                uint32_t sK, int part) {
  using Tile = typename Config::Tile;
  const uint64_t b_v =
      Tile::by_columns(uniform(sK + part * (Config::COLUMNS / Tile::COLUMNS) * Tile::BYTES));
  hold(p);
  hold(out.x[0]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < KT; ++k) {
    wgmma<typename Config::T, true>(out.x[0], p[k][0], b_v + Tile::columns_step(k));
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(out.x[0]);
}

// What store_partial() wrote, at least a barrier before, joins what comes behind it.
template <int OT, class Place>
__device__ __forceinline__ void fold_stored(const DecodeParams& p, Partial<OT>& later,
                                            int64_t record, const Place& own) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = own.row(h);
    if (row >= p.tile_rows) continue;
    const int64_t at = record * p.tile_rows + row;
    const float2 stats = p.partial_stats[at];  // of the row, by whatever thread
    const float* out = p.partial_out + at * Place::Config::HEAD_DIM_V;
    const Fold fold(stats.x, later.top[h]);
    later.top[h] = fold.top;
    later.sum[h] = fold(stats.y, later.sum[h]);
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float2 earlier = *reinterpret_cast<const float2*>(out + own.column(n));
      float (&x)[4] = later.out.x[0][n];
      x[2 * h] = fold(earlier.x, x[2 * h]);
      x[2 * h + 1] = fold(earlier.y, x[2 * h + 1]);
    }
  }
  __syncthreads();  // everybody has looked at the statistics, which may be written again
}

// A part, at its last unit, into its group, and that into its task, or to memory: what is not complete
// rests, what blocks share is stored. bounds: the units that are the block's.
template <class Config, int OT>
__device__ __forceinline__ void take_part(const DecodeParams& p,
                                          const typename Config::Shares& shares,
                                          const DecodeCursor& at, int share, int2 bounds,
                                          const WarpgroupPlace<Config>& own, Partial<OT>& part) {
  constexpr int PART_UNITS = LATENT_PART_UNITS;
  const bool owns_task = bounds.x <= at.task_begin() && at.task_end() <= bounds.y;
  const bool owns_group = bounds.x <= at.group_begin() && at.group_end() <= bounds.y;
  if (!owns_group) {
    const int64_t record = shares.part_record(p, at) + at.unit % GROUP_UNITS / PART_UNITS;
    return store_partial(p, part, record, own);
  }
  const int64_t group_rest = shares.group_rest(p, share), task_rest = shares.task_rest(share);
  if (at.part_begin<PART_UNITS>() > at.group_begin()) fold_stored(p, part, group_rest, own);
  if (at.position + 1 < at.group_end()) return store_partial(p, part, group_rest, own);
  if (!owns_task) return store_partial(p, part, shares.group_record(p, at, share), own);
  if (at.group_begin() > at.task_begin()) fold_stored(p, part, task_rest, own);
  if (at.position + 1 < at.task_end()) return store_partial(p, part, task_rest, own);
  store_result(p, part, at, own);
}

template <class Config>
__device__ __forceinline__ void mla_sm90_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int STAGES = Config::STAGES;
  constexpr int STAGE_BYTES = Config::BLOCK_N * Config::HEAD_DIM * 2;
  constexpr int STEPS = Config::BLOCK_N / 16;  // of P @ V in a tile
  constexpr int OT = Config::COLUMNS / 8;
  static_assert(STAGES == 2, "Q is copied with the tile that it comes before");

  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sRing = shared_address(smem.ring);
  const uint32_t sQ = shared_address(smem.q);
  const WarpgroupPlace<Config> own;

  wait_for_previous<Target>();
  let_next_start<Target>();
  if (p.packing.cu_seqlens_q != nullptr) fill_uncovered<Config>(p);
  const typename Config::Shares shares(p, smem.shares);
  const int share = blockIdx.x;
  int share_begin = shares.begin(share);
  int share_end = shares.begin(share + 1);
  if (share_begin == share_end) return;
  DecodeCursor at = shares.find(p, smem.shares, share_begin);
  if (!shares.keep_whole(p, smem.shares, at, share_begin, share_end)) return;
  int units = share_end - share_begin;
  if (threadIdx.x == 0) smem.share_begin = share_begin, smem.share_end = share_end;

  UnitLoader<Config> loader(p, at, units);
  const bool loads = own.part == Config::WARPGROUPS - 1;
  if (loads) loader.fetch(p, sRing);
  cp_async_commit();
  int stage = 0;
  // The next tile is in; everybody is done with the one before, whose stage is filled again.
  const auto arrive = [&] {
    cp_async_wait<0>();
    fence_proxy_async();  // wgmma reads what was copied
    __syncthreads();
    if (loads) loader.fetch(p, sRing + (1 - stage) * STAGE_BYTES);
    cp_async_commit();
    const uint32_t tile = sRing + stage * STAGE_BYTES;
    stage = 1 - stage;
    return tile;
  };

  const float scale_log2 = p.scores.scale * LOG2_E;
  typename Config::Exchange& exchange = smem.exchange;
  Partial<OT> part;
  TaskRows rows(p, at, own);

  bool is_first = true;
#pragma unroll 1
  for (; units > 0; --units, at.advance(p)) {
    if (at.unit == at.extent.first || is_first) {
      is_first = false;
      fetch_queries<Config>(p, at, sQ);
      rows = TaskRows(p, at, own);
      part.clear();
    }
    const int key0 = at.unit * UNIT_KEYS;
    const bool all_see = rows.all_see(key0);
#pragma unroll 1
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sK = arrive();
      if (own.part == 0) {
        Accumulator<1, Config::BLOCK_N / 8> s;
        multiply_keys<Config>(s, sQ, sK);
        if (!all_see) rows.hide(s, key0 + i * Config::BLOCK_N);
        float keep[2];
        to_weights(s, part.top, part.sum, keep, scale_log2);
        exchange.keep[own.thread()] = {keep[0], keep[1]};
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
          uint32_t a[1][4];
          to_a_operand<Target, T>(a, s, k);
          exchange.weights[k][own.thread()] = {a[0][0], a[0][1], a[0][2], a[0][3]};
        }
      }
      __syncthreads();  // P; the next arrive() is behind the last look at it
      const float2 kept = exchange.keep[own.thread()];
      const float keep[2] = {kept.x, kept.y};
      rescale(part.out, keep);
      uint32_t weights[STEPS][1][4];
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        const uint4 a = exchange.weights[k][own.thread()];
        weights[k][0][0] = a.x, weights[k][0][1] = a.y, weights[k][0][2] = a.z,
        weights[k][0][3] = a.w;
      }
      multiply_values<Config>(part.out, weights, sK, own.part);
    }
    if (at.position + 1 < at.part_end<LATENT_PART_UNITS>()) continue;

    // The part is complete: top and sum of its rows for both warpgroups
    __syncthreads();  // everybody has looked at keep
    if (own.part == 0) {
      exchange.stats[own.thread()] = {part.top[0], part.top[1], quad_sum(part.sum[0]),
                                      quad_sum(part.sum[1])};
    }
    __syncthreads();
    const float4 stats = exchange.stats[own.thread()];
    part.top[0] = stats.x, part.top[1] = stats.y, part.sum[0] = stats.z, part.sum[1] = stats.w;
    take_part<Config>(p, shares, at, share, {smem.share_begin, smem.share_end}, own, part);
    part.clear();
  }
  cp_async_wait<0>();
}

}  // namespace flash_dist

// Attention of many heads to a cache of latent keys (MLA), on wgmma: the values are the first
// HEAD_DIM_V columns of the keys, which are read once for both products.
//
// Grid      As many blocks as the GPU holds, one for each split of the key blocks of all sequences
//           (core/decode_work.cuh), in whole groups.
// Block     A warpgroup that loads, and two consumers of 64 rows, queries of all heads. The first
//           consumer computes S and P of a tile of 64 keys and hands P to the second, thread by thread:
//           both have the same rows. Each has half of the columns of O.
// Shared    Two tiles of K and one of Q, in panels of 64 columns; P.
// Pipeline  The copy engine fills a tile panel by panel, with a barrier for each, so that S begins with
//           the first panel. A panel is filled again after its last read: those that are no values
//           after S, those of each half of O after its product. S of the next tile of a group is
//           issued right behind O of this one, so that nothing in between delays it. The queries of the
//           next work tile are loaded after the last S of this one.
//
// O of 64 rows fills the registers: there is no room for O of a group beside O of a work tile. So each
// group has one online softmax over its tiles, and is never cut. O of the work tile before it rests in
// memory (sm90/mla/rest.cuh).
#pragma once

#include <type_traits>

#include "core/decode_rows.cuh"
#include "core/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/mla/config.h"
#include "sm90/mla/loader.cuh"
#include "sm90/mla/output.cuh"
#include "sm90/mla/rest.cuh"
#include "sm90/rows.cuh"

namespace flash_dist {

// Barriers of both consumers: P of a tile is stored; the second one has read it. From ROWS_CLEARED
// on, one of each consumer.
enum LatentBarrier : int { P_READY = 1, P_TAKEN, ROWS_CLEARED };

// The rows and columns of a work tile that a thread has, as the accumulators of a warpgroup.
template <class Config_>
struct WarpgroupPlace {
  using Config = Config_;
  int part;  // number of the consumer, the same for a warp

  __device__ __forceinline__ WarpgroupPlace()
      : part(static_cast<int>(uniform(threadIdx.x / WARPGROUP)) - 1) {}
  // The two rows of this lane, h = 0 or 1.
  __device__ __forceinline__ int row(int h) const {
    return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + static_cast<int>(threadIdx.x) % 32 / 4 +
           8 * h;
  }
  // The first of two neighbouring columns of O in x[0][n].
  __device__ __forceinline__ int column(int n) const {
    return part * Config::COLUMNS + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2;
  }
  // Whether this lane writes top and sum of its rows.
  __device__ __forceinline__ bool writes_stats() const { return part == 0 && threadIdx.x % 4 == 0; }
  __device__ __forceinline__ int thread() const { return threadIdx.x % WARPGROUP; }
};

// Called by a warp after its last read.
__device__ __forceinline__ void release(const uint64_t& empty) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_address(&empty));
}

// S = Q @ K.T                                             [64, BLOCK_N], by the first consumer
// Issues panels BEGIN to END, in the order in which panels of K are loaded.
template <class Config, int BEGIN = 0, int END = Config::PANELS>
__device__ __forceinline__ void multiply_keys(Accumulator<1, Config::BLOCK_N / 8>& s,
                                              const typename Config::Smem& smem,
                                              const typename Config::Stages& ring) {
  using T = typename Config::T;
  using Tile = typename Config::Tile;
  constexpr int STEPS = Tile::COLUMNS / 16;  // of a panel
  constexpr int FIRST = Config::keys_alone().first;
  const uint64_t a_q = Tile::by_rows(uniform(shared_address(smem.q)));
  const uint64_t b_k = Tile::by_rows(uniform(shared_address(smem.k[ring.stage()])));
#pragma unroll
  for (int i = BEGIN; i < END; ++i) {
    const int panel = (FIRST + i) % Config::PANELS;
    mbarrier_wait(shared_address(&smem.k_full[ring.stage()][panel]), ring.parity());
    wgmma_fence();
#pragma unroll
    for (int k = panel * STEPS; k < (panel + 1) * STEPS; ++k) {
      if (k == FIRST * STEPS) {
        wgmma<T, false, false, true>(s.x[0], a_q + Tile::rows_step(k), b_k + Tile::rows_step(k));
      } else {
        wgmma<T, false, false>(s.x[0], a_q + Tile::rows_step(k), b_k + Tile::rows_step(k));
      }
    }
  }
  wgmma_commit();
}

// O += P @ V                                              [64, COLUMNS], by each consumer
// Issues the products.
template <class Config, int OT, int KT>
__device__ __forceinline__ void multiply_values(Accumulator<1, OT>& out, uint32_t (&p)[KT][1][4],
                                                uint32_t sV) {
  const uint64_t b_v = Config::Tile::by_columns(uniform(sV));
  hold(p);
  hold(out.x[0]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < KT; ++k) {
    wgmma<typename Config::T, true>(out.x[0], p[k][0], b_v + Config::Tile::columns_step(k));
  }
  wgmma_commit();
}

// The two warpgroups that compute.
template <class Config>
class LatentConsumer {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Tile = typename Config::Tile;
  using Smem = typename Config::Smem;
  using Place = WarpgroupPlace<Config>;
  static constexpr int STEPS = Config::BLOCK_N / 16;  // of P @ V in a tile
  static constexpr int OT = Config::COLUMNS / 8;
  static constexpr int AHEAD =
      1;  // panels of S that are issued before O of the tile before is complete

 public:
  __device__ __forceinline__ LatentConsumer(const DecodeParams& p, Smem& smem)
      : p_(p), smem_(smem) {}

  // Computes the key blocks of the split, `key_blocks` of them, in whole groups.
  __device__ __forceinline__ void run(int key_blocks) {
#pragma unroll 1
    for (int done = 0; done < key_blocks;) {
      await_tile();
      const DecodeCursor& first = key_block(done);
      const int count = first.group_end() - first.position;
      const bool ends_tile =
          done + count == key_blocks || first.key_block + count == first.extent.end;
      part_.clear();
      if (own_.part == 0) {
        if (begins_tile(first, done == 0))
          mbarrier_wait(shared_address(&smem_.q_full), tiles_++ % 2);
        lead(done, count * Config::TILES, ends_tile);
      } else {
        follow(done, count * Config::TILES);
      }
      done += count;
      part_.sum[0] = quad_sum(part_.sum[0]);
      part_.sum[1] = quad_sum(part_.sum[1]);
      take_group(key_block(done - 1));
    }
    if (own_.part == 0) barrier_sync(P_TAKEN, Config::CONSUMER_THREADS);  // of the last tile
  }

 private:
  using Scores = Accumulator<1, Config::BLOCK_N / 8>;
  using Weights = uint32_t[STEPS][1][4];

  // The cursor of a key block of the split. Valid once one of its tiles is loaded.
  __device__ __forceinline__ const DecodeCursor& key_block(int number) const {
    return smem_.key_blocks[number % Config::CURSORS];
  }

  // Waits for the next tile. NOTE: for a panel that this consumer itself releases, or the barrier
  // might be two tiles on.
  __device__ __forceinline__ void await_tile() const {
    const int panel = own_.part == 0 ? Config::keys_alone().first : Config::values_of(1).first;
    mbarrier_wait(shared_address(&smem_.k_full[ring_.stage()][panel]), ring_.parity());
  }

  // Computes a group, first consumer: S of a tile is under way with O of the tile before.
  __device__ __forceinline__ void lead(int first, int tiles, bool ends_tile) {
    Scores s;
    multiply_keys<Config>(s, smem_, ring_);
#pragma unroll 1
    for (int i = 0; i + 1 < tiles; ++i) {
      lead_tile(s, key_block(first + i / Config::TILES), i % Config::TILES, false,
                std::false_type{});
    }
    lead_tile(s, key_block(first + (tiles - 1) / Config::TILES), (tiles - 1) % Config::TILES,
              ends_tile, std::true_type{});
  }
  template <class IsLast>
  __device__ __forceinline__ void lead_tile(Scores& s, const DecodeCursor& at, int tile,
                                            bool ends_tile, IsLast) {
    const int key0 = at.key_block * KEY_BLOCK + tile * Config::BLOCK_N;
    const bool all_visible = TileRows(p_, at, own_).all_visible(at.key_block * KEY_BLOCK);
    wgmma_wait<0>();
    hold(s.x[0]);
    release(smem_.k_empty[ring_.stage()][Config::keys_alone().number]);
    if (ends_tile) release(smem_.q_empty);
    if (!all_visible) TileRows(p_, at, own_).mask(s, key0);
    Weights weights;
    float keep[2];
    to_weights(s, part_.top, part_.sum, keep, p_.scores.scale * LOG2_E);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) to_a_operand<Target, T>(weights[k], s, k);
    give_weights(weights);
    rescale_out(keep);
    clear_missing(at, key0);
    multiply_values<Config>(part_.out, weights, own_values());
    const uint64_t& empty = smem_.k_empty[ring_.stage()][Config::values_of(0).number];
    ring_.advance();
    if constexpr (IsLast::value) {
      wgmma_wait<0>();
    } else {
      // NOTE: to issue all of S takes as long as its products, and O may be complete.
      multiply_keys<Config, 0, AHEAD>(s, smem_, ring_);
      wgmma_wait<1>();
    }
    hold(part_.out.x[0]);
    hold(weights);
    release(empty);
    if constexpr (!IsLast::value) multiply_keys<Config, AHEAD>(s, smem_, ring_);
  }

  // Stores P of a tile for the second consumer.
  __device__ __forceinline__ void give_weights(const Weights& weights) const {
    if (ring_.passed > 0) barrier_sync(P_TAKEN, Config::CONSUMER_THREADS);
    auto& exchange = smem_.exchange;
    const int thread = own_.thread();
    exchange.stats[thread] = {part_.top[0], part_.top[1], part_.sum[0], part_.sum[1]};
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      const uint32_t (&a)[4] = weights[k][0];
      exchange.weights[k][thread] = {a[0], a[1], a[2], a[3]};
    }
    barrier_arrive(P_READY, Config::CONSUMER_THREADS);
  }

  // Computes a group, second consumer.
  __device__ __forceinline__ void follow(int first, int tiles) {
#pragma unroll 1
    for (int i = 0; i < tiles; ++i, ring_.advance()) {
      Weights weights;
      float keep[2];
      take_weights(weights, keep);
      const DecodeCursor& at = key_block(first + i / Config::TILES);
      rescale_out(keep);
      clear_missing(at, at.key_block * KEY_BLOCK + i % Config::TILES * Config::BLOCK_N);
      multiply_values<Config>(part_.out, weights, own_values());
      wgmma_wait<0>();
      hold(part_.out.x[0]);
      release(smem_.k_empty[ring_.stage()][Config::values_of(1).number]);
    }
  }

  // Zeroes values of keys that do not exist, in the columns of this consumer: their weights are
  // zeros, but memory may hold NaN. After S, which is masked there.
  __device__ __forceinline__ void clear_missing(const DecodeCursor& at, int key0) const {
    const RowSpan exist{at.extent.visible_begin - key0, at.extent.visible_end - key0};
    if (exist.first <= 0 && exist.end >= Config::BLOCK_N) return;
    if (own_.part == 0) barrier_sync(ROWS_CLEARED, WARPGROUP);  // all of its warps have S
    clear_rows<Tile, Config::BLOCK_N, Config::OWN_PANELS, WARPGROUP>(own_values(), exist,
                                                                     own_.thread());
    fence_proxy_async();
    barrier_sync(ROWS_CLEARED + own_.part, WARPGROUP);
  }

  // Skips the products where no row of the warp has a greater top than before.
  __device__ __forceinline__ void rescale_out(const float (&keep)[2]) {
    const bool changes = keep[0] != 1.0f || keep[1] != 1.0f;
    if (__any_sync(0xffffffffu, changes)) rescale(part_.out, keep);
  }

  __device__ __forceinline__ uint32_t own_values() const {
    return shared_address(smem_.k[ring_.stage()]) + own_.part * Config::OWN_PANELS * Tile::BYTES;
  }

  // Reads P of a tile, second consumer.
  __device__ __forceinline__ void take_weights(Weights& weights, float (&keep)[2]) {
    constexpr PanelGroup OWN = Config::values_of(1);
#pragma unroll
    for (int i = 0; i < OWN.count; ++i) {
      const uint64_t& full = smem_.k_full[ring_.stage()][OWN.first + i];
      mbarrier_wait(shared_address(&full), ring_.parity());
    }
    barrier_sync(P_READY, Config::CONSUMER_THREADS);
    const auto& exchange = smem_.exchange;
    const int thread = own_.thread();
    const float4 stats = exchange.stats[thread];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      const uint4 a = exchange.weights[k][thread];
      weights[k][0][0] = a.x, weights[k][0][1] = a.y, weights[k][0][2] = a.z,
      weights[k][0][3] = a.w;
    }
    barrier_arrive(P_TAKEN, Config::CONSUMER_THREADS);
    keep[0] = Combine(part_.top[0], stats.x).keep;  // as the first consumer computes it
    keep[1] = Combine(part_.top[1], stats.y).keep;
    part_.top[0] = stats.x, part_.top[1] = stats.y, part_.sum[0] = stats.z, part_.sum[1] = stats.w;
  }

  // Combines a complete group with its work tile, which rests in memory until it is complete, or
  // stores the partial if other splits have key blocks of the work tile, too.
  __device__ __forceinline__ void take_group(const DecodeCursor& at) {
    const int2 bounds = smem_.bounds;
    const bool owns_tile = bounds.x <= at.tile_begin() && at.tile_end() <= bounds.y;
    if (!owns_tile) {
      return store_partial(p_, part_, smem_.splits.group_partial(p_, at, fresh_block()), own_);
    }
    const TileRest<Place, OT> rest(p_, own_);
    if (at.group_begin() > at.tile_begin()) rest.combine_into(part_);
    if (at.position + 1 < at.tile_end()) return rest.store(part_);
    store_tile(p_, part_, at, own_);
  }

  const DecodeParams& p_;
  Smem& smem_;
  const Place own_;
  Partial<OT> part_;
  typename Config::Stages ring_;
  int tiles_ = 0;
};

template <class Config>
__device__ __forceinline__ void mla_sm90_block(const MlaSm90Params& params) {
  using Target = typename Config::Target;
  const DecodeParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_map(params.k);
    smem.make_barriers();
  }

  let_next_start<Target>();
  if (p.packing.cu_seqlens_q != nullptr) fill_uncovered<Config>(p);
  const typename Config::Splits splits(p, smem.counting);
  int begin, end;
  DecodeCursor at;
  if (!splits.find_split(p, smem.counting, blockIdx.x, at, begin, end)) return;
  if (threadIdx.x == 0) smem.splits = splits, smem.bounds = {begin, end};
  __syncthreads();  // shared memory and barriers are initialized

  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x < 32) {
      LatentKeys<Config>(params, smem).load(at, end - begin);
    } else {
      load_queries<Config>(p, smem, at, end - begin);
    }
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    LatentConsumer<Config>(p, smem).run(end - begin);
  }
}

}  // namespace flash_dist

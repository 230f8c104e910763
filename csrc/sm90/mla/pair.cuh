// Attention of many heads to a cache of latent keys by clusters of two blocks, for calls with at
// most half as many work tiles as multiprocessors. Each block computes what one consumer of
// sm90/mla/kernel.cuh computes, with the same bits: S of one tile of each key block, and half of
// the columns of O.
//
// Grid      A cluster for each split of the key blocks.
// Block     A warpgroup that loads, and one that computes.
// Exchange  Each thread sends P of its tile, with tops and sums of the rows, to the same thread of
//           the other block, through one of SLOTS places in that block's memory. When a block sends
//           P of key block n, it has received P of key block n - 1 from the other block. The other
//           block sent that after it had read P of key block n - 2, so the slot is free.
// Shared    Q. Of the block's own tile, whose S it computes: the block's columns, in two buffers,
//           so that those of the next key block arrive during P @ V; and the other columns, which
//           are read only for S. Of the other block's tile: the columns of this block.
#pragma once

#include "core/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/mla/consumer.cuh"
#include "sm90/mla/launch.h"
#include "sm90/mla/loader.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct MlaPairSm90Config : MlaSm90ConfigOf<MlaPairSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T,
                                           HEAD_DIM, HEAD_DIM_V, PLAN, 2> {
  using Base = MlaSm90ConfigOf<MlaPairSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                               HEAD_DIM_V, PLAN, 2>;
  using typename Base::Splits;
  using typename Base::Tile;
  static constexpr int OWN = Base::OWN_PANELS;       // panels of a tile with the block's columns
  static constexpr int OTHERS = Base::PANELS - OWN;  // the other panels of a tile
  static constexpr int OWN_TILES = 2, SLOTS = 2;
  static constexpr int CURSORS = 4;  // the loader is at most two key blocks ahead
  static constexpr int STEPS = Base::BLOCK_N / 16;
  // Bytes per warp: P, tops and sums.
  static constexpr int WARP_SLOT_BYTES = STEPS * 32 * 16 + 8 * 16;

  // Returns the panel of the block's own tile that is number i in the order in which S uses the
  // panels. The block's columns come first.
  __device__ __forceinline__ static int own_panel(int part, int i) {
    return Base::scores_panel(part, i);
  }

  struct Smem {
    alignas(1024) uint8_t own[OWN_TILES][OWN * Tile::BYTES];
    alignas(1024) uint8_t others[OTHERS * Tile::BYTES];
    alignas(1024) uint8_t theirs[OWN * Tile::BYTES];
    alignas(1024) uint8_t q[Base::PANELS * Tile::BYTES];
    uint4 weights[SLOTS][WARPS_OF_GROUP][STEPS][32];
    float4 stats[SLOTS][WARPS_OF_GROUP][8];  // two rows each: their tops, then their sums
    uint64_t own_full[OWN_TILES][OWN], others_full[OTHERS], theirs_full;
    uint64_t own_empty[OWN_TILES], others_empty, theirs_empty;
    uint64_t q_full, q_empty, slot_full[SLOTS][WARPS_OF_GROUP];
    typename Splits::Smem counting;
    Splits splits;
    int2 bounds;  // key blocks [begin, end) of the split
    DecodeCursor key_blocks[CURSORS];
    __device__ Smem() = delete;  // only a layout of shared memory, never constructed

    // Initializes the barriers. Called by one thread.
    __device__ __forceinline__ void make_barriers() {
      const auto make = [](uint64_t& barrier, int arrivals) {
        mbarrier_init(shared_address(&barrier), arrivals);
      };
      for (auto& tile : own_full)
        for (uint64_t& full : tile) make(full, 1);
      for (uint64_t& full : others_full) make(full, 1);
      make(theirs_full, OWN);  // the loader arrives once per panel
      for (uint64_t& empty : own_empty) make(empty, WARPS_OF_GROUP);
      make(others_empty, WARPS_OF_GROUP);
      make(theirs_empty, WARPS_OF_GROUP);
      make(q_full, Base::QUERY_LOADERS);
      make(q_empty, WARPS_OF_GROUP);
      for (auto& slot : slot_full)
        for (uint64_t& full : slot) {
          make(full, 1);
          mbarrier_expect(shared_address(&full), WARP_SLOT_BYTES);
        }
      mbarriers_made();
    }
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

// Loads, in one warp, the keys of a split that block `part` of a cluster needs.
template <class Config>
class PairKeys : LatentKeyLoader<Config> {
  using Base = LatentKeyLoader<Config>;
  using Base::number_;
  using Base::smem_;
  using typename Base::Smem;
  using typename Base::Tile;

 public:
  __device__ __forceinline__ PairKeys(const MlaSm90Params& params, Smem& smem, int part)
      : Base(params, smem), part_(part) {}

  __device__ __forceinline__ void load(DecodeCursor at, int key_blocks) {
    this->find(at);
#pragma unroll 1
    for (; number_ < key_blocks; ++number_) {
      const int i = number_ % Config::OWN_TILES;
      mbarrier_wait(shared_address(&smem_.own_empty[i]), number_ / Config::OWN_TILES % 2 ^ 1);
      this->begin(at);
      load<0, Config::OWN>(smem_.own[i], smem_.own_full[i]);
      mbarrier_wait(shared_address(&smem_.others_empty), number_ % 2 ^ 1);
      load<Config::OWN, Config::OTHERS>(smem_.others, smem_.others_full);
      mbarrier_wait(shared_address(&smem_.theirs_empty), number_ % 2 ^ 1);
      this->template load_panels<Config::OWN>(1 - part_, [&](int panel) {
        return place(Config::own_panel(part_, panel), smem_.theirs, panel, smem_.theirs_full);
      });
      if (number_ + 1 == key_blocks) return;
      at.advance(this->params_.p);
      this->find(at);
    }
  }

 private:
  __device__ __forceinline__ static PanelPlace place(int panel, const uint8_t* panels, int number,
                                                     const uint64_t& full) {
    return {panel, shared_address(panels) + number * Tile::BYTES, shared_address(&full)};
  }
  // Loads COUNT panels of the block's own tile, from panel FIRST on in the order of own_panel().
  template <int FIRST, int COUNT>
  __device__ __forceinline__ void load(const uint8_t* panels, const uint64_t (&full)[COUNT]) const {
    this->template load_panels<COUNT>(part_, [&](int i) {
      return place(Config::own_panel(part_, FIRST + i), panels, i, full[i]);
    });
  }

  const int part_;
};

// The warpgroup that computes.
template <class Config>
class PairConsumer : LatentConsumerBase<Config> {
  using Base = LatentConsumerBase<Config>;
  using Base::add_sums;
  using Base::group_end_;
  using Base::key_block;
  using Base::multiply;
  using Base::number_;
  using Base::own_;
  using Base::part_;
  using Base::smem_;
  using typename Base::Scores;
  using typename Base::Smem;
  using typename Base::Tile;
  using typename Base::Weights;

 public:
  __device__ __forceinline__ PairConsumer(const LatentParams& p, Smem& smem, int part)
      : Base(p, smem, {part}) {}

  // Computes the key blocks of the split in complete groups.
  __device__ __forceinline__ void run(int key_blocks) {
    Scores s;
#pragma unroll 1
    while (number_ < key_blocks) {
      mbarrier_wait(shared_address(&smem_.own_full[number_ % Config::OWN_TILES][0]), parity(0));
      this->begin_group();
      sum_second_[0] = sum_second_[1] = 0.0f;
      if (own_.part == 0) {
        compute<0>(s, key_blocks);
      } else {
        compute<1>(s, key_blocks);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) part_.sum[h] = __fadd_rn(part_.sum[h], sum_second_[h]);
      this->finish_group(key_block(-1));
    }
  }

 private:
  // Returns the parity of the phase that fills this block's own tile of the key block that comes
  // `ahead` key blocks after this one.
  __device__ __forceinline__ int parity(int ahead) const {
    return (number_ + ahead) / Config::OWN_TILES % 2;
  }

  // Computes a group. S of its first key block has been computed already, except at the start of
  // the split.
  template <int PART>
  __device__ __forceinline__ void compute(Scores& s, int key_blocks) {
    if (number_ == 0) {
      issue_scores<PART, 0, Config::PANELS>(s, 0, true);
      this->await_scores(s);
    }
#pragma unroll 1
    do {
      if (number_ == this->tile_end_) release(smem_.q_empty);
      release(smem_.others_empty);
      compute_key_block<PART>(s, number_ + 1 < key_blocks);
      this->await_scores(s);
    } while (++number_ < group_end_);
  }

  // Computes a key block, then S of the next one.
  template <int PART>
  __device__ __forceinline__ void compute_key_block(Scores& s, bool goes_on) {
    Weights own, theirs;
    float top[2], sum[2], their_top[2], their_sum[2];
    const SeeOneTile one_tile = this->template mask<PART>(s);
    own.make(s, this->scale(), one_tile, top, sum);
    sum[0] = quad_sum(sum[0]), sum[1] = quad_sum(sum[1]);
    send<PART>(own, top, sum);
    clear_missing<PART>();
    if constexpr (PART == 0) {
      float before[2] = {part_.top[0], part_.top[1]};
      TileFactors factors(part_.top, top);
      add_sums(part_.sum, sum, factors.keep, factors.add);
      own.scale(factors.add);
      rescale(part_.out, factors.keep);
      multiply(own_values(), own);
      take(theirs, their_top, their_sum);
      const KeyBlockFactors both(before, top, their_top);
      add_sums(sum_second_, their_sum, both.keep, both.add_second);
      factors = TileFactors(part_.top, their_top);
      theirs.scale(factors.add);
      part_.sum[0] *= factors.keep[0];
      part_.sum[1] *= factors.keep[1];
      mbarrier_wait(shared_address(&smem_.theirs_full), number_ % 2);
      wgmma_wait<0>();
      hold(part_.out.x[0]);
      hold(own.a);
      release(smem_.own_empty[number_ % Config::OWN_TILES]);
      rescale(part_.out, factors.keep);
      multiply(shared_address(smem_.theirs), theirs);
    } else {
      take(theirs, their_top, their_sum);
      float before[2] = {part_.top[0], part_.top[1]};
      const KeyBlockFactors both(before, their_top, top);
      TileFactors factors(part_.top, their_top);
      add_sums(part_.sum, their_sum, factors.keep, factors.add);
      factors = TileFactors(part_.top, top);
      part_.sum[0] *= factors.keep[0];
      part_.sum[1] *= factors.keep[1];
      add_sums(sum_second_, sum, both.keep, both.add_second);
      own.scale(both.add_second);
      rescale(part_.out, both.keep);
      multiply(own_values(), own);
      theirs.scale(both.add_first);
      mbarrier_wait(shared_address(&smem_.theirs_full), number_ % 2);
      multiply(shared_address(smem_.theirs), theirs);
      wgmma_wait<1>();
      hold(own.a);
      release(smem_.own_empty[number_ % Config::OWN_TILES]);
    }
    if (goes_on) {
      // NOTE: issuing all of S takes as long as its products. O may be complete earlier, so only
      // the first panel is issued before the wait.
      issue_scores<PART, 0, 1>(s, 1, false);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    hold(part_.out.x[0]);
    hold(theirs.a);
    release(smem_.theirs_empty);
    if (goes_on) issue_scores<PART, 1, Config::PANELS>(s, 1, false);
  }

  // S = Q @ K.T of the block's own tile                    [64, BLOCK_N]
  // Issues panels BEGIN to END of the key block that is `ahead` key blocks after this one, in the
  // order of own_panel().
  template <int PART, int BEGIN, int END>
  __device__ __forceinline__ void issue_scores(Scores& s, int ahead, bool is_first) {
    const int number = (number_ + ahead) % Config::OWN_TILES;
    const uint64_t a_q = Tile::by_rows(uniform(shared_address(smem_.q)));
    const uint64_t b_own = Tile::by_rows(uniform(shared_address(smem_.own[number])));
    const uint64_t b_others = Tile::by_rows(uniform(shared_address(smem_.others)));
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const uint64_t a = a_q + Tile::rows_step(Config::scores_panel(PART, i) * Base::PANEL_STEPS);
      if (i < Config::OWN) {
        mbarrier_wait(shared_address(&smem_.own_full[number][i]), parity(ahead));
      } else {
        mbarrier_wait(shared_address(&smem_.others_full[i - Config::OWN]), (number_ + ahead) % 2);
      }
      if (i == 0) {
        this->await_queries(key_block(ahead), is_first);
        this->template multiply_panel<true>(s, a, b_own);
      } else if (i < Config::OWN) {
        this->template multiply_panel<false>(s, a, b_own + Tile::rows_step(i * Base::PANEL_STEPS));
      } else {
        this->template multiply_panel<false>(
            s, a, b_others + Tile::rows_step((i - Config::OWN) * Base::PANEL_STEPS));
      }
    }
    wgmma_commit();
  }

  // Returns the address of this block's columns of V in its own tile.
  __device__ __forceinline__ uint32_t own_values() const {
    return shared_address(smem_.own[number_ % Config::OWN_TILES]);
  }
  // Zeroes the values outside rows_that_exist(), in both tiles.
  template <int PART>
  __device__ __forceinline__ void clear_missing() const {
    if (!this->template lacks_keys<0>() && !this->template lacks_keys<1>()) return;
    mbarrier_wait(shared_address(&smem_.theirs_full), number_ % 2);
    barrier_sync(ALL_CONSUMERS, WARPGROUP);  // all warps have completed S
    this->template clear_values<PART, Config::OWN>(own_values());
    this->template clear_values<1 - PART, Config::OWN>(shared_address(smem_.theirs));
    fence_proxy_async();  // orders these zeros before reads by wgmma and before the next copy
    barrier_sync(ALL_CONSUMERS, WARPGROUP);
  }

  __device__ __forceinline__ static int warp() { return static_cast<int>(threadIdx.x) / 32 % 4; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  // Sends P of this block's own tile, with tops and sums, to the other block.
  template <int PART>
  __device__ __forceinline__ void send(const Weights& weights, const float (&top)[2],
                                       const float (&sum)[2]) const {
    const auto there = [](const void* p) { return address_in(1 - PART, shared_address(p)); };
    const int slot = number_ % Config::SLOTS;
    const uint32_t full = there(&smem_.slot_full[slot][warp()]);
    const uint32_t to = there(&smem_.weights[slot][warp()][0][lane()]);
#pragma unroll
    for (int k = 0; k < Config::STEPS; ++k) {
      const uint32_t (&a)[4] = weights.a[k][0];
      store_remote_16(to + k * 512, {a[0], a[1], a[2], a[3]}, full);
    }
    if (lane() % 4 == 0) {
      store_remote_16(there(&smem_.stats[slot][warp()][lane() / 4]),
                      {__float_as_uint(top[0]), __float_as_uint(top[1]), __float_as_uint(sum[0]),
                       __float_as_uint(sum[1])},
                      full);
    }
  }
  // Receives P, tops and sums of the other block's tile.
  __device__ __forceinline__ void take(Weights& weights, float (&top)[2], float (&sum)[2]) const {
    const int slot = number_ % Config::SLOTS;
    const uint32_t full = shared_address(&smem_.slot_full[slot][warp()]);
    mbarrier_wait(full, number_ / Config::SLOTS % 2);
    const uint32_t from = shared_address(&smem_.weights[slot][warp()][0][lane()]);
#pragma unroll
    for (int k = 0; k < Config::STEPS; ++k) {
      const uint4 a = load_shared_16(from + k * 512);
      weights.a[k][0][0] = a.x, weights.a[k][0][1] = a.y;
      weights.a[k][0][2] = a.z, weights.a[k][0][3] = a.w;
    }
    const uint4 stats = load_shared_16(shared_address(&smem_.stats[slot][warp()][lane() / 4]));
    top[0] = __uint_as_float(stats.x), top[1] = __uint_as_float(stats.y);
    sum[0] = __uint_as_float(stats.z), sum[1] = __uint_as_float(stats.w);
    __syncwarp();
    if (lane() == 0) mbarrier_expect(full, Config::WARP_SLOT_BYTES);
  }

  float sum_second_[2];  // row sums over second tiles; part_.sum: over first tiles
};

template <class Config>
__device__ __forceinline__ void mla_pair_sm90_block(const MlaSm90Params& params) {
  const LatentParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const typename Config::Splits splits = begin_block<Config>(params, smem);
  if (splits.total <= p.few_key_blocks) return;
  const int split = split_of_block<Config>(p), part = cluster_rank();
  int begin, end;
  DecodeCursor at;
  if (!splits.find_split(p, smem.counting, split, at, begin, end)) return;
  if (threadIdx.x == 0) smem.splits = splits, smem.bounds = {begin, end};
  __syncwarp();
  cluster_sync();  // shared memory and barriers of both blocks are initialized

  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x < 32) {
      PairKeys<Config>(params, smem, part).load(at, end - begin);
    } else {
      load_queries<Config>(p, smem, at, end - begin);
    }
  } else {
    give_registers<Config::KEPT_REGISTERS>();
    PairConsumer<Config>(p, smem, part).run(end - begin);
  }
}

}  // namespace flash_dist

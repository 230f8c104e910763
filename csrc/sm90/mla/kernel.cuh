// Attention of many heads to a cache of latent keys (MLA), with wgmma: the values are the first
// HEAD_DIM_V columns of the keys, which are read once for both products.
//
// Grid      For each split of the key blocks of all sequences (core/decode_work.cuh), one block, or
//           two with 64 rows each; at most as many as the GPU holds. Splits never cut a group.
// Block     A warpgroup that loads, and two consumers of the same 64 rows. A row is a query of a
//           head. A key block of 128 keys is two tiles. The first consumer computes S and P of the
//           first tile, the second consumer those of the second tile. Each has half of the columns
//           of O. While one computes its softmax, the other multiplies (FlashMLA's seesaw).
// Shared    Both tiles of K and one of Q, in panels of 64 columns. P of a tile is stored in the
//           tile's last panel, which holds no values and is read only for S.
// Pipeline  TMA fills the tiles panel by panel, with a barrier for each panel, so that S begins
//           with the first panel. A panel is filled again after its last read. S of the next key
//           block is issued right after O of this one. The queries of the next work tile are loaded
//           after the last S of this work tile.
// Order     The first consumer adds P @ V of the first tile and then of the second; the second
//           consumer adds its own tile first. So the panels of each consumer's own tile are free,
//           and are filled for its next S, before its O is complete. Row maxima are whole numbers
//           (exception: sm90/mla/weights.cuh), so rescaling is exact, even for P of the first tile.
//
// O of 64 rows fills the registers: there is no room for both O of a group and O of a work tile. So
// each group has one online softmax over its tiles, and splits never cut it. O of the previous
// groups of the work tile is kept in memory (sm90/mla/rest.cuh).
#pragma once

#include "core/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/mla/consumer.cuh"

namespace flash_dist {

// P_READY + i: P of tile i is stored. SUMS_READY: both consumers have stored their sums. HAS_SCORES
// + i: all warps of consumer i have S.
enum LatentBarrier : int { P_READY = 1, SUMS_READY = P_READY + 2, HAS_SCORES };

// The consumer warpgroups. The first one computes S of the first tile of a key block, and the first
// half of the columns of O.
template <class Config>
class LatentConsumer : LatentConsumerBase<Config> {
  using Base = LatentConsumerBase<Config>;
  using Base::group_end_;
  using Base::key_block;
  using Base::number_;
  using Base::own_;
  using Base::p_;
  using Base::part_;
  using Base::scale;
  using Base::smem_;
  using typename Base::Scores;
  using typename Base::Smem;
  using typename Base::Tile;
  using typename Base::Weights;

 public:
  __device__ __forceinline__ LatentConsumer(const LatentParams& p, Smem& smem)
      : Base(p, smem,
             {static_cast<int>(uniform(threadIdx.x / WARPGROUP)) - 1, block_row0<Config>(p)}) {}

  // Computes the key blocks of the split in complete groups. key_blocks: their number.
  __device__ __forceinline__ void run(int key_blocks) {
    Scores s;
    // NOTE: take_group() is outside of compute(), so that both consumers run the same
    // instructions. These run so seldom that they must be fetched each time.
#pragma unroll 1
    while (number_ < key_blocks) {
      begin_group();
      if (own_.part == 0) {
        compute<0>(s, key_blocks);
      } else {
        compute<1>(s, key_blocks);
      }
      take_group(key_block(-1));
    }
  }

  // Stores P of the key blocks instead of computing O.
  __device__ __forceinline__ void store_weights(int key_blocks) {
    if (own_.part == 0) {
      store_weights_of<0>(key_blocks);
    } else {
      store_weights_of<1>(key_blocks);
    }
  }

 private:
  __device__ __forceinline__ void begin_group() {
    const int panel = Config::scores_panel(own_.part, 0);
    mbarrier_wait(shared_address(&smem_.k_full[own_.part][panel]), number_ % 2);
    Base::begin_group();
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
      if constexpr (PART == 0) {
        lead(s, number_ + 1 < key_blocks);
      } else {
        follow(s, number_ + 1 < key_blocks);
      }
      this->await_scores(s);
    } while (++number_ < group_end_);
  }

  template <int PART>
  __device__ __forceinline__ void store_weights_of(int key_blocks) {
#pragma unroll 1
    for (; number_ < key_blocks; ++number_) {
      begin_group();
      store_tile_weights<PART>();
    }
  }

  // Stores P of this consumer's tile of a key block, with top and sum of its rows.
  template <int PART>
  __device__ __forceinline__ void store_tile_weights() {
    Scores s;
    Weights weights;
    float top[2], sum[2];
    issue_scores<PART, 0, Config::PANELS>(s, 0, number_ == 0);
    this->await_scores(s);
    const DecodeCursor at = key_block();
    const SeeOneTile one_tile = this->template mask<PART>(s);
    release(smem_.k_empty[PART][0]);
    release(smem_.k_empty[PART][1]);
    if (at.key_block + 1 == at.extent.end) release(smem_.q_empty);
    weights.make(s, scale(), one_tile, top, sum);
    const int64_t tile = int64_t{smem_.bounds.x + number_} * Config::TILES + PART;
    weights.store(p_.weights + tile * LATENT_TILE * LATENT_TILE, own_.row(0));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = quad_sum(sum[h]);
      if (threadIdx.x % 4 == 0) p_.tile_stats[tile * LATENT_TILE + own_.row(h)] = {top[h], sum[h]};
    }
  }

  // First consumer: computes a key block, then S of the next one.
  __device__ __forceinline__ void lead(Scores& s, bool goes_on) {
    Weights first, second;
    float top[2], sum[2];
    const SeeOneTile one_tile = this->template mask<0>(s);
    first.make(s, scale(), one_tile, top, sum);
    give_weights<0>(first, top);
    TileFactors factors(part_.top, top);
    first.scale(factors.add);
    rescale(part_.out, factors.keep);
    this->multiply(values<0>(0), first);
    add_sums(sum, factors.keep, factors.add);
    barrier_sync(P_READY + 1, Config::CONSUMER_THREADS);
    read_tops(top, 1);
    second.load(weights_panel(1));
    factors = TileFactors(part_.top, top);
    second.scale(factors.add);
    part_.sum[0] *= factors.keep[0];
    part_.sum[1] *= factors.keep[1];
    wgmma_wait<0>();
    hold(part_.out.x[0]);
    hold(first.a);
    release(smem_.k_empty[0][0]);
    rescale(part_.out, factors.keep);
    this->multiply(values<0>(1), second);
    if (goes_on) {
      // NOTE: issuing all of S takes as long as its products. O may be complete earlier, so only
      // the first panel is issued before the wait.
      issue_scores<0, 0, 1>(s, 1, false);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    hold(part_.out.x[0]);
    hold(second.a);
    release(smem_.k_empty[1][0]);
    if (goes_on) issue_scores<0, 1, Config::PANELS>(s, 1, false);
  }

  // Second consumer: computes a key block, then S of the next one.
  __device__ __forceinline__ void follow(Scores& s, bool goes_on) {
    Weights first, second;
    float top[2], top_first[2], sum[2];
    const SeeOneTile one_tile = this->template mask<1>(s);
    second.make(s, scale(), one_tile, top, sum);
    give_weights<1>(second, top);
    barrier_sync(P_READY, Config::CONSUMER_THREADS);
    read_tops(top_first, 0);
    const KeyBlockFactors factors(part_.top, top_first, top);
    second.scale(factors.add_second);
    rescale(part_.out, factors.keep);
    this->multiply(values<1>(1), second);
    first.load(weights_panel(0));
    first.scale(factors.add_first);
    this->multiply(values<1>(0), first);
    add_sums(sum, factors.keep, factors.add_second);
    wgmma_wait<1>();
    hold(second.a);
    release(smem_.k_empty[1][1]);
    wgmma_wait<0>();
    hold(part_.out.x[0]);
    hold(first.a);
    release(smem_.k_empty[0][1]);
    if (goes_on) issue_scores<1, 0, Config::PANELS>(s, 1, false);
  }

  // S = Q @ K.T of this consumer's tile                    [64, BLOCK_N]
  // Issues panels BEGIN to END of the key block that is `ahead` key blocks after this one, in the
  // order of scores_panel().
  template <int PART, int BEGIN, int END>
  __device__ __forceinline__ void issue_scores(Scores& s, int ahead, bool is_first) {
    const int parity = (number_ + ahead) % 2;
    const uint64_t a_q = Tile::by_rows(uniform(shared_address(smem_.q)));
    const uint64_t b_k = Tile::by_rows(uniform(shared_address(smem_.k[PART])));
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const int panel = Config::scores_panel(PART, i);
      mbarrier_wait(shared_address(&smem_.k_full[PART][panel]), parity);
      if (i == 0) this->await_queries(key_block(ahead), is_first);
      const uint64_t at = Tile::rows_step(panel * Base::PANEL_STEPS);
      if (i == 0) {
        this->template multiply_panel<true>(s, a_q + at, b_k + at);
      } else {
        this->template multiply_panel<false>(s, a_q + at, b_k + at);
      }
    }
    wgmma_commit();
  }

  // Adds the sums of a tile to those of the group.
  __device__ __forceinline__ void add_sums(const float (&sum)[2], const float (&keep)[2],
                                           const float (&add)[2]) {
    Base::add_sums(part_.sum, {quad_sum(sum[0]), quad_sum(sum[1])}, keep, add);
  }

  __device__ __forceinline__ uint32_t weights_panel(int tile) const {
    return shared_address(smem_.k[tile]) + Config::P_PANEL * Tile::BYTES;
  }
  // Returns the address of the consumer's columns of the values of a tile.
  template <int PART>
  __device__ __forceinline__ uint32_t values(int tile) const {
    return shared_address(smem_.k[tile]) + PART * Config::OWN_PANELS * Tile::BYTES;
  }

  // Stores P of this consumer's tile, and its tops, for the other consumer. Zeroes the values
  // outside rows_that_exist().
  template <int PART>
  __device__ __forceinline__ void give_weights(const Weights& weights,
                                               const float (&top)[2]) const {
    const bool clears = this->template lacks_keys<PART>();
    barrier_sync(HAS_SCORES + PART, WARPGROUP);
    if (clears) {
      this->template clear_values<PART, Config::V_PANELS>(shared_address(smem_.k[PART]));
    }
    weights.store(weights_panel(PART));
    if (threadIdx.x % 4 == 0) {
      smem_.tops[PART][own_.row_of_block(0)] = top[0];
      smem_.tops[PART][own_.row_of_block(1)] = top[1];
    }
    fence_proxy_async();  // orders these stores before reads by wgmma and before the next copy
    barrier_arrive(P_READY + PART, Config::CONSUMER_THREADS);
    if (clears) barrier_sync(HAS_SCORES + PART, WARPGROUP);
  }
  __device__ __forceinline__ void read_tops(float (&top)[2], int tile) const {
    top[0] = smem_.tops[tile][own_.row_of_block(0)];
    top[1] = smem_.tops[tile][own_.row_of_block(1)];
  }

  // Ends a group of key blocks: adds the row sums of both consumers.
  __device__ __forceinline__ void take_group(const DecodeCursor& at) {
    if (threadIdx.x % 4 == 0) {
      smem_.sums[own_.part][own_.row_of_block(0)] = part_.sum[0];
      smem_.sums[own_.part][own_.row_of_block(1)] = part_.sum[1];
    }
    barrier_sync(SUMS_READY, Config::CONSUMER_THREADS);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      part_.sum[h] = __fadd_rn(part_.sum[h], smem_.sums[1 - own_.part][own_.row_of_block(h)]);
    }
    this->finish_group(at);
  }
};

// Runs a block. With STORES_WEIGHTS it stores P of the key blocks of its split, but only if all
// splits together have at most few_key_blocks key blocks. Without it, the block computes O, but
// only if all splits together have more.
template <class Config, bool STORES_WEIGHTS>
__device__ __forceinline__ void latent_block(const MlaSm90Params& params) {
  const LatentParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const typename Config::Splits splits = begin_block<Config>(params, smem);
  if (STORES_WEIGHTS != (splits.total <= p.few_key_blocks)) return;
  const int split = split_of_block<Config>(p);
  int begin = splits.begin(split), end = splits.begin(split + 1);
  DecodeCursor at;
  if constexpr (STORES_WEIGHTS) {
    if (begin == end) return;
    at = splits.find(p, smem.counting, begin);
  } else {
    if (!splits.find_split(p, smem.counting, split, at, begin, end)) return;
  }
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
    LatentConsumer<Config> consumer(p, smem);
    if constexpr (STORES_WEIGHTS) {
      consumer.store_weights(end - begin);
    } else {
      consumer.run(end - begin);
    }
  }
}

template <class Config>
__device__ __forceinline__ void mla_sm90_block(const MlaSm90Params& params) {
  latent_block<Config, false>(params);
}
template <class Config>
__device__ __forceinline__ void mla_weights_sm90_block(const MlaSm90Params& params) {
  latent_block<Config, true>(params);
}

}  // namespace flash_dist

// A warpgroup of 64 keys in a block that sums half of the columns of dK or dV.
//
//   S = K @ Q(0).T; P(0); P(0) to the other block and to memory
//   for each further pair i of items, of which this block computes one:
//     issue S = K @ Q(i).T
//     issue dV += P(i - 1) @ dO of the even item, wait for S
//     issue dV += P(i - 1) @ dO of the odd item, wait for the even one
//     P(i); P(i) to the other block and to memory; wait for the odd one
//   dV += P of the last pair @ dO
//
// dK is computed likewise, from dP = V @ dO.T, dS and Q. Both blocks sum the items in ascending
// order, and so does every query chunk, whether it begins with an even or an odd item of the
// sequence.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/bwd/dkdv_steps.cuh"
#include "sm90/bwd_halves/config.h"

namespace flash_dist {

template <class Config>
class DkdvHalvesConsumer {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Steps = DkdvSm90Steps<Config>;
  using Scores = typename Steps::Scores;
  using Fragments = typename Steps::Fragments;
  using StageStatistics = typename Steps::StageStatistics;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  using SumSlice = Accumulator<1, Config::SLICE / 8>;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int SUM_SLICES = Config::SUM_SLICES;
  static constexpr int THREADS = Config::CONSUMERS * WARPGROUP;
  static constexpr int SHIFT = std::is_same_v<T, Fp16> ? 8 : 0;  // log2 of P's factor

 public:
  __device__ __forceinline__ DkdvHalvesConsumer(const typename Config::Params& params,
                                                typename Config::Smem& smem, int rank)
      : params_(params), smem_(smem), rank_(rank), sums_dk_(params.sums_dk) {}

  __device__ __forceinline__ void run() {
    SumSlice sums[SUM_SLICES];
#pragma unroll
    for (int i = 0; i < SUM_SLICES; ++i) sums[i].clear();
    if (!p_.sums_first) {
      each_partial(sums, [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
    }
    mbarrier_wait(shared_address(&smem_.keys_full), 0);  // the sums later overwrite the keys
    if (work_.items > 0) mainloop(sums);
    store(sums);
  }

 private:
  __device__ __forceinline__ void mainloop(SumSlice (&sums)[SUM_SLICES]) {
    const int pairs = Config::pairs(work_.items);
    Scores x;
    Fragments own, other;
    clear_keys();
    issue_first(x, rank_);
    wgmma_wait<0>();
    end_first(x);
    finish(x, own, rank_, skip_weights());
#pragma unroll 1
    for (int pair = 1; pair < pairs; ++pair) {
      issue_first(x, 2 * pair + rank_);
      exchange(own, other, pair - 1);
      issue_second<0, 1>(sums, own, 2 * pair - 2);
      wgmma_wait<1>();
      end_first(x);
      issue_second<1, SUM_SLICES>(sums, own, 2 * pair - 2);
      const auto weights = skip_weights();
      issue_second<0, 1>(sums, other, 2 * pair - 1);
      wgmma_wait<1>();
      end_second(own);
      issue_second<1, SUM_SLICES>(sums, other, 2 * pair - 1);
      finish(x, own, 2 * pair + rank_, weights);
      wgmma_wait<0>();
      hold_all(sums);
      end_second(other);
    }
    exchange(own, other, pairs - 1);
    issue_second<0, SUM_SLICES>(sums, own, 2 * pairs - 2);
    issue_second<0, SUM_SLICES>(sums, other, 2 * pairs - 1);
    wgmma_wait<0>();
    hold(own);
    hold(other);
    hold_all(sums);
    // The last slices are not released, because no slices follow them. But this block must not end
    // before the other block has arrived at this block's barriers for the last time.
    wait_until_taken(pairs);
  }

  // S^T = K @ Q.T, or dP^T = V @ dO.T                       [64, BLOCK_M]
  // Each slice is released once the next one has been issued; end_first() releases the last slice.
  __device__ __forceinline__ void issue_first(Scores& x, int number) {
    constexpr int STEPS = Config::SLICE / 16;
    const uint64_t a = KTile::by_rows(uniform(own_keys()));
#pragma unroll
    for (int i = 0; i < Config::SLICES; ++i) {
      const uint64_t b = QTile::by_rows(wait_for_slice(number));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        const uint64_t keys = a + KTile::rows_step(i * STEPS + k),
                       queries = b + QTile::rows_step(k);
        if (i == 0 && k == 0) {
          wgmma<T, false, false, true>(x.x[0], keys, queries);
        } else {
          wgmma<T, false, false>(x.x[0], keys, queries);
        }
      }
      wgmma_commit();
      if (i > 0) {
        wgmma_wait<1>();
        release();
      }
      slices_.advance();
    }
  }
  __device__ __forceinline__ void end_first(Scores& x) {
    hold(x.x[0]);
    release();
  }

  // dV += P^T @ dO, or dK += dS^T @ Q                       [64, SLICE] for slices BEGIN to END
  template <int BEGIN, int END>
  __device__ __forceinline__ void issue_second(SumSlice (&sums)[SUM_SLICES], Fragments& a,
                                               int number) {
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const uint32_t queries = wait_for_slice(number);
      Steps::issue_sum(sums[i], a, queries);
      slices_.advance();
    }
  }
  // Releases the slices that a completed product has read.
  __device__ __forceinline__ void end_second(Fragments& a) {
    hold(a);
#pragma unroll
    for (int i = 0; i < SUM_SLICES; ++i) release();
  }
  __device__ __forceinline__ static void hold_all(SumSlice (&sums)[SUM_SLICES]) {
#pragma unroll
    for (int i = 0; i < SUM_SLICES; ++i) hold(sums[i].x[0]);
  }

  // Waits for a slice of an item's queries, and returns its address.
  __device__ __forceinline__ uint32_t wait_for_slice(int number) const {
    wait_for_data(slices_);
    const uint32_t slice = uniform(shared_address(smem_.slices[slices_.stage]));
    if (p_.packing.cu_seqlens_q != nullptr) clear_queries(slice, item(number).row0);
    return slice;
  }
  __device__ __forceinline__ void wait_for_data(const typename Config::Slices& at) const {
    mbarrier_wait(shared_address(&smem_.full[at.stage]), at.parity);
  }
  // Releases the oldest slice that this warp has read and not yet released.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&smem_.empty[read_.stage]));
    read_.advance();
  }

  // Returns the next stage. In the launch that sums dK, skips this stage, which will hold P of this
  // block's next item.
  __device__ __forceinline__ typename Config::Slices skip_weights() {
    const typename Config::Slices here = slices_;
    if (sums_dk_) slices_.advance();
    return here;
  }

  // Computes P from S, or dS from dP, as A operands. Keeps them for this block, sends them to the
  // other block, and stores them to global memory.
  __device__ __forceinline__ void finish(Scores& x, Fragments& own, int number,
                                         const typename Config::Slices& weights) {
    const DkdvItem& here = item(number);
    const int code = number < work_.items ? tile_code(p_, work_, here, consumer()) : TILE_EMPTY;
    const StageStatistics statistics(smem_.statistics[number / 2 % Config::PAIRS],
                                     fresh_thread() % 4 * 8);
    if (sums_dk_) {
      wait_for_data(weights);
      const uint32_t at = shared_address(smem_.slices[weights.stage]) + consumer() * DS_TILE_BYTES +
                          warp_of_consumer() * (BLOCK_M / 16) * DS_BLOCK_BYTES +
                          fresh_thread() % 32 * 16;
#pragma unroll
      for (int k = 0; k < BLOCK_M / 16; ++k) {
        const uint4 pt = load_shared_16(at + k * DS_BLOCK_BYTES);
        Steps::template weigh_gradients<SHIFT>(x, k, pt, statistics);
      }
      hold(x.x[0]);
      release();
    } else {
      if (code != TILE_FULL && code != TILE_EMPTY) steps_.apply_mask(x, here, code);
      steps_.template exponentiate<SHIFT>(x, statistics);
    }
    Steps::to_fragments(own, x);
    if (code == TILE_EMPTY) clear(own);
    send(own, number / 2);
    if (code != TILE_EMPTY) steps_.store_gradients(own, here);
  }
  __device__ __forceinline__ static void clear(Fragments& a) {
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][0][i] = 0;
  }

  // Receives the other block's fragments of a pair. Afterwards `own` has the fragments of the
  // pair's even item, and `other` those of the odd item.
  __device__ __forceinline__ void exchange(Fragments& own, Fragments& other, int pair) {
    take(other, pair);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t a = own[k][0][i], b = other[k][0][i];
        own[k][0][i] = rank_ == 0 ? a : b;
        other[k][0][i] = rank_ == 0 ? b : a;
      }
  }

  // Returns the index of this warp among the consumers' warps.
  __device__ __forceinline__ static int warp() { return fresh_thread() / 32 - WARPS_OF_GROUP; }
  __device__ __forceinline__ uint32_t exchange_full() const {
    return shared_address(&smem_.exchange.full[warp()]);
  }
  __device__ __forceinline__ uint32_t exchange_empty() const {
    return shared_address(&smem_.exchange.empty[warp()]);
  }
  __device__ __forceinline__ uint32_t exchange_place() const {
    return shared_address(&smem_.exchange.fragments[warp()][0][fresh_thread() % 32]);
  }

  // Waits until the other block has read the fragments of all pairs before this one.
  __device__ __forceinline__ void wait_until_taken(int pair) const {
    mbarrier_wait(exchange_empty(), pair % 2 ^ 1);
  }
  __device__ __forceinline__ void send(const Fragments& a, int pair) const {
    const uint32_t at = address_in(rank_ ^ 1, exchange_place());
    const uint32_t full = address_in(rank_ ^ 1, exchange_full());
    wait_until_taken(pair);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      store_remote_16(at + k * 512, {a[k][0][0], a[k][0][1], a[k][0][2], a[k][0][3]}, full);
    }
  }
  __device__ __forceinline__ void take(Fragments& a, int pair) const {
    mbarrier_wait(exchange_full(), pair % 2);
    uint32_t loaded = 0;
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      const uint4 x = load_shared_16(exchange_place() + k * 512);
      a[k][0][0] = x.x, a[k][0][1] = x.y, a[k][0][2] = x.z, a[k][0][3] = x.w;
      loaded |= x.x;
    }
    hold(a);
    __syncwarp();
    if (fresh_thread() % 32 == 0) {
      mbarrier_expect(exchange_full(), Config::Exchange::WARP_BYTES);  // for the next pair
      // NOTE: after this arrival the other block overwrites the fragments.
      mbarrier_arrive_remote(address_in(rank_ ^ 1, exchange_empty()) + zero_behind(loaded, rank_));
    }
  }

  __device__ __forceinline__ const DkdvItem& item(int number) const {
    return smem_.item[number % Config::ITEMS];
  }
  // Returns the address of this warpgroup's rows of K or V.
  __device__ __forceinline__ uint32_t own_keys() const {
    return shared_address(smem_.keys) + Steps::group_row0() * KTile::ROW_BYTES;
  }

  // Zeroes this warpgroup's rows of K or V whose keys do not exist.
  __device__ __forceinline__ void clear_keys() const {
    if (!steps_.lacks_keys()) return;
    clear_rows<KTile, Steps::KEYS, Config::PANELS, WARPGROUP>(own_keys(), steps_.keys_here(),
                                                              fresh_thread() % WARPGROUP);
    Steps::publish_zeros();
  }
  // Zeroes the rows of a slice that belong to the next sequence. Both warpgroups call this, with
  // the same slice.
  __device__ __forceinline__ void clear_queries(uint32_t slice, int row0) const {
    if (!steps_.lacks_queries(row0)) return;
    clear_rows<QTile, BLOCK_M, Config::SLICE_PANELS, THREADS>(slice, {0, work_.seqlen_q - row0},
                                                              fresh_thread() - WARPGROUP);
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, THREADS);
  }

  __device__ __forceinline__ int column0() const { return rank_ * Config::COLUMNS; }
  template <class F>
  __device__ __forceinline__ void each_partial(SumSlice (&sums)[SUM_SLICES], F f) const {
#pragma unroll
    for (int i = 0; i < SUM_SLICES; ++i) {
      steps_.each_partial(sums[i], sums_dk_ ? p_.dk_partial : p_.dv_partial, f, Config::HEAD_DIM,
                          column0() + i * Config::SLICE);
    }
  }
  // Writes this warpgroup's rows of the sum: either as partial sums, or rounded, through its rows
  // of K or V in shared memory.
  __device__ __forceinline__ void store(SumSlice (&sums)[SUM_SLICES]) const {
#pragma unroll
    for (int i = 0; i < SUM_SLICES; ++i) sums[i].scale(scale());
    if (keeps_sums(p_)) {
      return each_partial(sums, [](float& x, float& y, float2& at) { at = {x, y}; });
    }
    const DkdvBlock& block = work_.block;
    const int row0 = block.key0 + Steps::group_row0();
    const View& view = sums_dk_ ? p_.dk : p_.dv;
    const int barrier = ONE_CONSUMER + consumer();
    barrier_sync(barrier, WARPGROUP);  // all warps have read the keys
#pragma unroll
    for (int i = 0; i < SUM_SLICES; ++i) {
      stage_rows<KTile, Target, T>(sums[i], own_keys() + i * Config::SLICE_PANELS * KTile::BYTES);
    }
    barrier_sync(barrier, WARPGROUP);
    copy_rows<KTile, Config::COLUMNS / 8>(own_keys(),
                                          head_begin(view, block.batch, block.head_kv, 0) +
                                              (work_.sequence.k0 + row0) * view.row + column0(),
                                          view.row, work_.seqlen_k - row0,
                                          (sums_dk_ ? p_.head_dim : p_.head_dim_v) - column0());
  }
  // Returns the factor with which the sums are stored. Partial sums of dK are scaled by the kernel
  // that adds them. Sums kept between query chunks are not scaled.
  __device__ __forceinline__ float scale() const {
    if (sums_dk_) return keeps_sums(p_) ? 1.0f : gradient_scale<T>(p_.softmax_scale);
    return p_.sums_last ? 1.0f / (1 << SHIFT) : 1.0f;
  }

  const typename Config::Params& params_;
  typename Config::Smem& smem_;
  const int rank_;
  const bool sums_dk_;
  const BwdParams& p_ = params_.p;
  const DkdvSm90Work& work_ = smem_.work;
  const Steps steps_{params_, smem_};
  typename Config::Slices slices_{}, read_{};  // the next slice to read, and the next to release
};

}  // namespace flash_dist

// A consumer warpgroup of the forward kernel for pairs of blocks: it computes 64 queries of one
// tile.
//
//   S = Q @ K(0).T; P(0) = softmax; P(0) to the other block
//   for each further pair i of steps, of which this block computes one:
//     issue S = Q @ K(i).T, then O += P(i - 1) @ V of this block's step
//     wait for S; mask; maxima to the other block
//     issue O += P(i - 1) @ V of the other block's step; that block has sent this P
//     wait for maxima of the other block; P(i) = exp2(S - max), sums; P(i) to the other block
//     wait for O; rescale it
//   O += P @ V of the last pair
//
// Both blocks use the same maxima for each pair: the maxima over the keys of both steps. The
// exchange needs no barrier to tell that data has been read. A block reads P(i - 1) of the other
// block before it sends its maxima of pair i, and waits for the other block's maxima before it
// sends P(i). So the other block has read P(i - 1) by then. It read the maxima of pair i - 1 even
// earlier, before it sent P(i - 1).
#pragma once

#include "core/uncovered.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fwd/softmax.cuh"
#include "sm90/fwd_pair/config.h"
#include "sm90/fwd_pair/output.cuh"
#include "sm90/rows.cuh"

namespace flash_dist {

template <class Config>
class FwdPairConsumer {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using QTile = typename Config::QTile;
  using KTile = typename Config::KTile;
  using Steps = typename Config::Steps;
  static constexpr int BLOCK_N = Config::BLOCK_N;
  static constexpr int V_SLICES = Config::V_SLICES;
  static constexpr int THREADS = Config::CONSUMERS * WARPGROUP;
  using Scores = Accumulator<1, BLOCK_N / 8>;
  using OutSlice = Accumulator<1, Config::SLICE / 8>;
  using Weights = uint32_t[BLOCK_N / 16][1][4];  // A operands of P @ V

 public:
  __device__ __forceinline__ FwdPairConsumer(const FwdSm90Params& params,
                                             typename Config::Smem& smem, int rank)
      : params_(params), smem_(smem), work_(smem.work), rank_(rank) {}

  __device__ __forceinline__ void run() {
    if (work_.sequence.uncovered_q && rank_ == 0) {
      fill_uncovered<Config, 2, WARPGROUP>(params_.p, work_.block);
    }
    if (!work_.has_queries()) return;
    if (!work_.has_keys()) return FwdPairOutput<Config>{params_, smem_, rank_}.store_empty();
    OutSlice o[V_SLICES];
#pragma unroll
    for (int i = 0; i < V_SLICES; ++i) o[i].clear();
    SoftmaxState<1> softmax;
    softmax.clear();
    mainloop(o, softmax);
    add_sums(softmax);
    store(o, softmax);
  }

 private:
  __device__ __forceinline__ void mainloop(OutSlice (&o)[V_SLICES], SoftmaxState<1>& softmax) {
    const StepPairs pairs{work_.bounds};
    const int count = pairs.count();
    const float scale_log2 = params_.p.softmax_scale * LOG2_E;
    Scores s;
    Weights own, other;
    float rescale[1][2];
    issue_scores<true>(s);
    wgmma_wait<0>();
    end_scores(s);
    mask(s, 0);
    {
      float top[2];
      find_tops(s, top);
      send_stats(top);
      weigh(s, softmax, rescale, top, scale_log2);
      send_weights(own, s);
    }
#pragma unroll 1
    for (int pair = 1; pair < count; ++pair) {
      issue_scores<false>(s);
      issue_values<0, 1>(o, own, pairs.step(pair - 1, rank_));
      wgmma_wait<1>();
      end_scores(s);
      issue_values<1, V_SLICES>(o, own, pairs.step(pair - 1, rank_));
      mask(s, pair);
      float top[2];
      find_tops(s, top);
      const uint32_t loaded = take_weights(other, pair - 1);
      send_stats(top, zero_behind(loaded, rank_));  // the other block may then send its next P
      issue_values<0, 1>(o, other, pairs.step(pair - 1, rank_ ^ 1));
      wgmma_wait<1>();
      end_values(own);
      issue_values<1, V_SLICES>(o, other, pairs.step(pair - 1, rank_ ^ 1));
      const bool grown = weigh(s, softmax, rescale, top, scale_log2);
      send_weights(own, s);
      wgmma_wait<0>();
      hold_all(o);
      end_values(other);
      // A factor of 1 changes nothing, so skipping the rescaling changes no bit.
      if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
        for (int i = 0; i < V_SLICES; ++i) rescale_rows(o[i], rescale);
      }
    }
    issue_last_values(o, own, rank_);
    take_weights(other, count - 1);
    issue_last_values(o, other, rank_ ^ 1);
    wgmma_wait<0>();
    hold(own);
    hold(other);
    hold_all(o);
    // The last slices are not released, because no slices follow them.
  }

  // S = Q @ K.T                                             [64, BLOCK_N]
  // Each slice of K is released once the next one has been issued; end_scores() releases the last
  // slice.
  template <bool IS_FIRST>
  __device__ __forceinline__ void issue_scores(Scores& s) {
    const uint64_t a_q =
        QTile::by_rows(uniform(shared_address(smem_.q) + consumer() * 64 * QTile::ROW_BYTES));
    constexpr int STEPS = Config::SLICE / 16;
#pragma unroll
    for (int i = 0; i < Config::K_SLICES; ++i) {
      if constexpr (IS_FIRST) mbarrier_wait(shared_address(&smem_.q_full[i]), 0);
      const uint64_t b_k = KTile::by_rows(wait_for_slice());
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        const uint64_t a = a_q + QTile::rows_step(i * STEPS + k), b = b_k + KTile::rows_step(k);
        if (i == 0 && k == 0) {
          wgmma<T, false, false, true>(s.x[0], a, b);
        } else {
          wgmma<T, false, false>(s.x[0], a, b);
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
  __device__ __forceinline__ void end_scores(Scores& s) {
    hold(s.x[0]);
    release();
  }

  // O += P @ V                                      [64, SLICE] for each slice from BEGIN to END
  template <int BEGIN, int END>
  __device__ __forceinline__ void issue_values(OutSlice (&o)[V_SLICES], Weights& p, int step) {
#pragma unroll
    for (int i = BEGIN; i < END; ++i) {
      const uint32_t slice = wait_for_slice();
      if (!is_clean(step)) clear_values(slice, step);
      const uint64_t b_v = KTile::by_columns(slice);
      hold(p);
      hold(o[i].x[0]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) {
        wgmma<T, true>(o[i].x[0], p[k][0], b_v + KTile::columns_step(k));
      }
      wgmma_commit();
      slices_.advance();
    }
  }
  // Issues O += P @ V for block `rank`'s step of the last pair. NOTE: if the pair lacks that step,
  // the slices loaded in its place are skipped: they hold another step's values, and an infinity
  // in them times a weight of 0 would be NaN.
  __device__ __forceinline__ void issue_last_values(OutSlice (&o)[V_SLICES], Weights& p, int rank) {
    const StepPairs pairs{work_.bounds};
    const int last = pairs.count() - 1;
    if (!pairs.lacks(last, rank)) return issue_values<0, V_SLICES>(o, p, pairs.step(last, rank));
#pragma unroll
    for (int i = 0; i < V_SLICES; ++i) {
      wait_for_slice();
      slices_.advance();
    }
  }
  // Releases the slices of V that a completed product has read.
  __device__ __forceinline__ void end_values(Weights& p) {
    hold(p);
#pragma unroll
    for (int i = 0; i < V_SLICES; ++i) release();
  }
  __device__ __forceinline__ static void hold_all(OutSlice (&o)[V_SLICES]) {
#pragma unroll
    for (int i = 0; i < V_SLICES; ++i) hold(o[i].x[0]);
  }

  __device__ __forceinline__ uint32_t wait_for_slice() const {
    mbarrier_wait(shared_address(&smem_.full[slices_.stage]), slices_.parity);
    return uniform(shared_address(smem_.slices[slices_.stage]));
  }
  // Releases the oldest slice that this warp has read and not yet released.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&smem_.empty[read_.stage]));
    read_.advance();
  }

  __device__ __forceinline__ int warp_row() const {
    return consumer() * 64 + warp_of_consumer() * 16;
  }

  // Sets masked scores to -inf in this block's step of a pair of steps.
  __device__ __forceinline__ void mask(Scores& s, int pair) const {
    const StepPairs pairs{work_.bounds};
    const Steps steps{work_.bounds};
    const int step = pairs.step(pair, rank_);
    if (pairs.lacks(pair, rank_)) {
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s.x[0][n][i] = -INFINITY;
    } else if (steps.is_list() || step >= work_.bounds.full_end || step < work_.bounds.full_begin) {
      VisibleKeys<BLOCK_N, KeySource::BOTH>::find_and_apply(s, Mask(params_.p.mask, work_.place),
                                                            steps, step, consumer(),
                                                            work_.block.row0 + warp_row());
    }
  }

  __device__ __forceinline__ static void find_tops(const Scores& s, float (&top)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = find_top(s, -INFINITY, 0, h);
  }

  // Converts S to P with the maxima of both blocks. Returns whether a maximum has grown.
  __device__ __forceinline__ bool weigh(Scores& s, SoftmaxState<1>& softmax, float (&rescale)[1][2],
                                        const float (&top)[2], float scale_log2) {
    const float2 peer = take_stats();
    const float tops[2] = {fmaxf(top[0], peer.x), fmaxf(top[1], peer.y)};
    return to_probabilities<Offsets::EXACT>(s, softmax, rescale, scale_log2, [&](int, int h) {
      const float row_max = softmax.row_max[0][h], grown = fmaxf(row_max, tops[h]);
      // NOTE: the comparison is false for NaN, as in sm90/fwd/softmax.cuh.
      return (grown - row_max) * scale_log2 <= MAXIMUM_MARGIN ? row_max : grown;
    });
  }

  // Adds the row sums over the other block's keys.
  __device__ __forceinline__ void add_sums(SoftmaxState<1>& softmax) {
    float sum[2] = {quad_sum(softmax.row_sum[0][0]), quad_sum(softmax.row_sum[0][1])};
    send_stats(sum);
    const float2 peer = take_stats();
    // normalize_rows() adds the sums of a quad's lanes, so only the first lane keeps the sum.
    const bool is_first = fresh_thread() % 4 == 0;
    softmax.row_sum[0][0] = is_first ? sum[0] + peer.x : 0.0f;
    softmax.row_sum[0][1] = is_first ? sum[1] + peer.y : 0.0f;
  }

  // Returns the index of this warp among the consumers' warps.
  __device__ __forceinline__ static int warp() { return fresh_thread() / 32 - WARPS_OF_GROUP; }

  // Sends the maxima or the sums of this warp's rows to the other block.
  __device__ __forceinline__ void send_stats(const float (&x)[2], uint32_t zero = 0) const {
    const int lane = fresh_thread() % 32;
    if (lane % 4 == 0) {
      store_remote_16(
          address_in(rank_ ^ 1, shared_address(&smem_.exchange.stats[warp()][lane / 4])) + zero,
          {__float_as_uint(x[0]), __float_as_uint(x[1]), 0, 0},
          address_in(rank_ ^ 1, shared_address(&smem_.exchange.stats_full[warp()])));
    }
    __syncwarp();
  }
  __device__ __forceinline__ float2 take_stats() {
    const uint32_t full = shared_address(&smem_.exchange.stats_full[warp()]);
    mbarrier_wait(full, stats_parity_);
    stats_parity_ ^= 1;
    const int lane = fresh_thread() % 32;
    if (lane == 0) mbarrier_expect(full, Config::Exchange::STATS_BYTES);  // for the next stats
    __syncwarp();
    return load_shared_8(shared_address(&smem_.exchange.stats[warp()][lane / 4]));
  }

  // Rounds P to A operands, and also sends them to the other block.
  __device__ __forceinline__ void send_weights(Weights& p, const Scores& s) const {
    const int lane = fresh_thread() % 32;
    const uint32_t at =
        address_in(rank_ ^ 1, shared_address(&smem_.exchange.weights[warp()][0][lane]));
    const uint32_t full =
        address_in(rank_ ^ 1, shared_address(&smem_.exchange.weights_full[warp()]));
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      to_a_operand<Target, T>(p[k], s, k);
      store_remote_16(at + k * 512, {p[k][0][0], p[k][0][1], p[k][0][2], p[k][0][3]}, full);
    }
  }
  // Loads P of the other block's step of a pair. Returns a value that depends on all loads, so that
  // zero_behind() can order a later store after them.
  __device__ __forceinline__ uint32_t take_weights(Weights& p, int pair) const {
    const uint32_t full = shared_address(&smem_.exchange.weights_full[warp()]);
    mbarrier_wait(full, pair % 2);
    const int lane = fresh_thread() % 32;
    if (lane == 0) mbarrier_expect(full, Config::Exchange::WEIGHTS_BYTES);  // for the next P
    __syncwarp();
    uint32_t loaded = 0;
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      const uint4 x = load_shared_16(shared_address(&smem_.exchange.weights[warp()][k][lane]));
      p[k][0][0] = x.x, p[k][0][1] = x.y, p[k][0][2] = x.z, p[k][0][3] = x.w;
      loaded |= x.x;
    }
    hold(p);
    __syncwarp();
    return loaded;
  }

  // Returns whether the values of a step need no clearing: all its keys exist, or the missing ones
  // are beyond the end of the tensor, where TMA has loaded zeros.
  __device__ __forceinline__ bool is_clean(int step) const {
    const FwdParams& p = params_.p;
    const Steps steps{work_.bounds};
    const int key0 = steps.is_list() ? steps.key0(step, 0) : steps.key0(step);
    const bool to_end = p.packing.cu_seqlens_q == nullptr && work_.keys.end == p.seqlen_k;
    return work_.keys.first <= key0 && (to_end || key0 + BLOCK_N <= work_.keys.end);
  }

  // Zeroes the values of keys that do not exist. All consumers call this, with the same step.
  __device__ __forceinline__ void clear_values(uint32_t slice, int step) const {
    const Steps steps{work_.bounds};
    const int key0 = steps.is_list() ? steps.key0(step, 0) : steps.key0(step);
    clear_rows<KTile, BLOCK_N, Config::SLICE_PANELS, THREADS>(
        slice, {work_.keys.first - key0, work_.keys.end - key0}, fresh_thread() - WARPGROUP);
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, THREADS);
  }

  // Stores out; block 0 also stores lse.
  __device__ __forceinline__ void store(OutSlice (&o)[V_SLICES], SoftmaxState<1>& softmax) const {
    const FwdParams& p = params_.p;
    const FwdBlock& block = work_.block;
    const int row = block.row0 + warp_row();
    float* lse = p.lse + lse_begin(p, block.batch, block.head, work_.sequence.q0) + row;
    const float* sink = p.sinks == nullptr ? nullptr : p.sinks + block.head;
#pragma unroll
    for (int i = 0; i < V_SLICES; ++i) {
      const bool writes_lse = i == 0 && rank_ == 0;
      normalize_rows(o[i], softmax, lse, fresh_thread() % 32,
                     writes_lse ? work_.sequence.seqlen_q - row : 0, p.softmax_scale, sink);
    }
    FwdPairOutput<Config>{params_, smem_, rank_}.store(o);
  }

  const FwdSm90Params& params_;
  typename Config::Smem& smem_;
  const typename Config::Work& work_;
  const int rank_;
  typename Config::Slices slices_, read_;  // the next slice to read, and the next to release
  int stats_parity_ = 0;
};

}  // namespace flash_dist

// What a warpgroup of the forward kernel for Hopper computes: 64 queries of a tile, step by step of
// keys.
//
//   S = Q @ K(last).T; P = softmax
//   for j from the one before the last down to the first:
//     issue S = Q @ K(j).T, then O += P @ V(j + 1)
//     wait for S; bend it, mask it; P = exp2(S - max), sums   while the second product is under way
//     wait for O; rescale it
//   O += P @ V(first)
#pragma once

#include "core/uncovered.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fwd/output.cuh"
#include "sm90/fwd/softmax.cuh"
#include "sm90/fwd/tiles.cuh"
#include "sm90/rows.cuh"

namespace flash_dist {

template <class Config, int BLOCK_N, Walk WALK>
struct FwdSm90Consumer : FwdSm90Tiles<Config, BLOCK_N, WALK> {
  using Tiles = FwdSm90Tiles<Config, BLOCK_N, WALK>;
  using typename Tiles::Keys, typename Tiles::KTile, typename Tiles::QTile, typename Tiles::Queries,
      typename Tiles::Smem, typename Tiles::Steps, typename Tiles::Works;
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Output = FwdSm90Output<Config>;
  using Scores = Accumulator<1, BLOCK_N / 8>;
  using Sums = Accumulator<1, Config::HEAD_DIM_V / 8>;
  using Probabilities = uint32_t[BLOCK_N / 16][1][4];  // operands of P @ V

  const typename Config::Params& params;
  Smem& smem;

  __device__ __forceinline__ FwdSm90Consumer(const typename Config::Params& params_, Smem& smem_)
      : params(params_), smem(smem_) {}

  __device__ __forceinline__ void run() const {
    Works works;
#pragma unroll 1
    while (true) {
      smem.work_barriers.wait_for_data(works);
      const FwdSm90Work& work = smem.work[works.stage()];
      if (work.is_closed()) break;
      if (work.sequence.uncovered_q) fill_uncovered<Config, 2, WARPGROUP>(params.p, work.block);
      if (work.has_queries()) {
        if (work.has_keys()) {
          compute(work);
        } else {
          Output{params, smem, work}.fill_unseeing();
        }
      }
      smem.work_barriers.release(works.stage());
      works.advance();
    }
    wait_until_read<0>();
  }

 private:
  __device__ __forceinline__ void compute(const FwdSm90Work& work) const {
    const FwdParams& p = params.p;
    Sums o;
    o.clear();
    SoftmaxState<1> state;
    state.clear();
    walk(work, o, state);

    const int row = work.block.row0 + warp_row();
    float* lse = p.lse + lse_begin(p, work.block.batch, work.block.head, work.sequence.q0) + row;
    const float* sink = p.sinks == nullptr ? nullptr : p.sinks + work.block.head;
    normalize_rows(o, state, lse, fresh_thread() % 32, work.sequence.seqlen_q - row,
                   Config::BENDS ? LN_2 : p.softmax_scale, sink);
    Output{params, smem, work}.store(o);
  }

  // The first query of this warp in the tile.
  __device__ __forceinline__ static int warp_row() {
    return consumer() * 64 + warp_of_consumer() * 16;
  }

  // ALiBi's slope of a tile's head.
  __device__ __forceinline__ float slope_of(const FwdSm90Work& work) const {
    if constexpr (!Config::BENDS) return 0.0f;
    return ramp_slope(params.p.scores, work.block.batch, work.block.head);
  }

  // The scores of step j, or of its first keys, become what the softmax takes.
  template <int NT>
  __device__ __forceinline__ void bend_step(Accumulator<1, NT>& s, const FwdSm90Work& work, int j,
                                            float slope) const {
    const Steps steps{work.bounds};
    const int row0 = work.block.row0 + warp_row() + work.place.seqlen_k - work.place.seqlen_q;
    bend(s, params.bend, slope, row0, [&](int n) { return steps.key(j, n * 8); });
  }

  // S = Q @ K.T                                             [64, BLOCK_N], or the first NT * 8 keys
  template <int NT>
  __device__ __forceinline__ void issue_scores(Accumulator<1, NT>& s, uint64_t a_q,
                                               const Keys& keys) const {
    const uint64_t b_k = KTile::by_rows(shared_address(smem.k[keys.stage()]));
    wgmma_fence();
    wgmma<T, false, false, true>(s.x[0], a_q, b_k);
#pragma unroll
    for (int k = 1; k < Config::HEAD_DIM / 16; ++k) {
      wgmma<T, false, false>(s.x[0], a_q + QTile::rows_step(k), b_k + KTile::rows_step(k));
    }
    wgmma_commit();
  }

  // O += P @ V                                              [64, HEAD_DIM_V]
  template <int KT>
  __device__ __forceinline__ void issue_output(Sums& o, uint32_t (&p)[KT][1][4], int stage) const {
    const uint64_t b_v = KTile::by_columns(shared_address(smem.v[stage]));
    hold(p);
    hold(o.x[0]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < KT; ++k) {
      wgmma<T, true>(o.x[0], p[k][0], b_v + KTile::columns_step(k));
    }
    wgmma_commit();
  }

  // The last step of a range, of which no more than TAIL_N keys exist: the others would add nothing.
  // K is in.
  __device__ __forceinline__ void add_tail(const FwdSm90Work& work, Sums& o, SoftmaxState<1>& state,
                                           uint64_t a_q, const Keys& keys, int j, float scale_log2,
                                           float slope) const {
    Accumulator<1, Config::TAIL_N / 8> s;
    uint32_t p[Config::TAIL_N / 16][1][4];
    float rescale[1][2];
    issue_scores(s, a_q, keys);
    wgmma_wait<0>();
    hold(s.x[0]);
    smem.k_barriers.release(keys.stage());
    if constexpr (Config::BENDS) bend_step(s, work, j, slope);
    const int row = work.block.row0 + warp_row() + fresh_thread() % 32 / 4;
    const Mask mask(params.p.mask, work.place);
    const int2 ranges[2] = {mask.keys(row), mask.keys(row + 8)};
    hide_ranges(s, ranges, j * BLOCK_N);
    make_probabilities(s, state, rescale, scale_log2);
#pragma unroll
    for (int k = 0; k < Config::TAIL_N / 16; ++k) to_a_operand<Target, T>(p[k], s, k);
    smem.v_barriers.wait_for_data(keys);
    if (!is_clean(work, j)) clear_values(work, j, keys.stage());
    issue_output(o, p, keys.stage());
    wgmma_wait<0>();
    hold(o.x[0]);
    smem.v_barriers.release(keys.stage());
  }

  __device__ __forceinline__ void walk(const FwdSm90Work& work, Sums& o,
                                       SoftmaxState<1>& state) const {
    const KeyBounds& bounds = work.bounds;
    const Steps steps{bounds};
    const float scale_log2 = Config::BENDS ? 1.0f : params.p.softmax_scale * LOG2_E;
    const float slope = slope_of(work);
    const Queries queries{work.queries};
    const uint64_t a_q = QTile::by_rows(
        uniform(shared_address(smem.q[queries.stage()]) + consumer() * 64 * QTile::ROW_BYTES));
    Scores s;
    Probabilities p;
    float rescale[1][2];
    Keys keys{work.tiles}, before;
    bool clean = true;  // whether all keys of the step before are there to be read

    const auto to_operands = [&](Probabilities& to) {
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) to_a_operand<Target, T>(to[k], s, k);
    };
    StepSight<BLOCK_N, WALK> ahead;
    const auto look = [&](int j) {
      ahead.find(Mask(params.p.mask, work.place), steps, j, consumer(),
                 work.block.row0 + warp_row());
    };
    const auto test = [&](int j) {
      ahead.hide(s, Mask(params.p.mask, work.place), steps, j, consumer(),
                 work.block.row0 + warp_row());
    };
    const auto add_values = [&](int j, Probabilities& p) {
      smem.v_barriers.wait_for_data(before);
      if (!clean) clear_values(work, j, before.stage());
      issue_output(o, p, before.stage());
    };
    // S of step j, while the product with P of the one before is under way.
    const auto begin_step = [&](int j, Probabilities& p, auto masked) {
      issue_scores(s, a_q, keys);
      add_values(j + 1, p);
      constexpr bool MASKED = decltype(masked)::value;
      if constexpr (MASKED && Config::LOOKS_AHEAD) look(j);
      wgmma_wait<1>();
      hold(s.x[0]);
      smem.k_barriers.release(keys.stage());
      if constexpr (Config::BENDS) bend_step(s, work, j, slope);
    };
    const auto end_product = [&](int j, Probabilities& p) {
      const int read = before.stage();
      before = keys;
      keys.advance();
      // NOTE: here for its jump, too, over which ptxas moves no exponential behind the next wait.
      if (j > bounds.begin) smem.k_barriers.wait_for_data(keys);
      wgmma_wait<0>();
      hold(o.x[0]);
      hold(p);
      smem.v_barriers.release(read);
    };

    int j = bounds.end - 1;
    smem.q_barriers.wait_for_data(queries);
    smem.k_barriers.wait_for_data(keys);
    bool has_tail = false;
    if constexpr (Config::TAIL_N > 0) {
      has_tail =
          !steps.is_list() && j > bounds.begin && work.keys.end - j * BLOCK_N <= Config::TAIL_N;
      if (has_tail) {
        add_tail(work, o, state, a_q, keys, j, scale_log2, slope);
        keys.advance();
        --j;
        smem.k_barriers.wait_for_data(keys);
      }
    }
    issue_scores(s, a_q, keys);
    wgmma_wait<0>();
    hold(s.x[0]);
    smem.k_barriers.release(keys.stage());
    if constexpr (Config::BENDS) bend_step(s, work, j, slope);
    if (j >= bounds.full_end || j < bounds.full_begin) {
      test(j);
      clean = is_clean(work, j);
    }
    const bool grew = make_probabilities(s, state, rescale, scale_log2);
    if (has_tail && __any_sync(0xffffffffu, grew)) rescale_rows(o, rescale);
    to_operands(p);
    before = keys;
    keys.advance();
    if (j > bounds.begin) smem.k_barriers.wait_for_data(keys);

    const auto step = [&](auto masked) {
      constexpr bool MASKED = decltype(masked)::value;
      begin_step(j, p, masked);
      if constexpr (MASKED && Config::LOOKS_AHEAD) ahead.apply(s, steps, j);
      if constexpr (MASKED && !Config::LOOKS_AHEAD) test(j);
      clean = !MASKED || is_clean(work, j);
      const bool grown = make_probabilities(s, state, rescale, scale_log2);
      hold(s.x[0]);
      end_product(j, p);
      to_operands(p);
      // Multiplying by 1 changes nothing, so the skip does not change a bit.
      if (__any_sync(0xffffffffu, grown)) rescale_rows(o, rescale);
    };
    // The same of a step without a test, whose maxima most likely stay: from `p` to `next`.
    const auto fast_step = [&](int j, Probabilities& p, Probabilities& next) {
      begin_step(j, p, std::false_type{});
      clean = true;
      bool grown = false;
      if (!try_probabilities<Target, T>(next, s, state, scale_log2)) {
        grown = make_probabilities(s, state, rescale, scale_log2);
        to_operands(next);
      }
      hold(next);
      end_product(j, p);
      if (__any_sync(0xffffffffu, grown)) rescale_rows(o, rescale);
    };
    --j;
    if constexpr (WALK == Walk::LISTS) {
#pragma unroll 1
      for (; j >= 0; --j) step(std::true_type{});
    } else {
      // Steps to test, steps to take as they are, steps to test.
#pragma unroll 1
      for (int round = 0; round < 2; ++round) {
#pragma unroll 1
        for (; j >= (round == 0 ? bounds.full_end : bounds.begin); --j) step(std::true_type{});
        if constexpr (Config::KEEP_S) {
#pragma unroll 1
          for (; j > bounds.full_begin; j -= 2) {
            Probabilities next;
            fast_step(j, p, next);
            fast_step(j - 1, next, p);
          }
        }
#pragma unroll 1
        for (; j >= bounds.full_begin; --j) step(std::false_type{});
      }
    }
    if constexpr (!Config::SHARES_Q) smem.q_barriers.release(queries.stage());
    add_values(bounds.begin, p);
    wgmma_wait<0>();
    hold(o.x[0]);
    smem.v_barriers.release(before.stage());
  }

  // Whether no row of a step's V needs to be set to zero. Those behind the end of the tensor are.
  __device__ __forceinline__ bool is_clean(const FwdSm90Work& work, int j) const {
    const FwdParams& p = params.p;
    const RowSpan& keys = work.keys;
    const Steps steps{work.bounds};
    const bool to_end = p.packing.cu_seqlens_q == nullptr && keys.end == p.seqlen_k;
    if (!steps.is_list()) {
      return keys.first <= steps.key0(j) && (to_end || steps.key0(j) + BLOCK_N <= keys.end);
    }
    // Tiles ascend.
    constexpr int LAST = Steps::PARTS == 0 ? 0 : Steps::PARTS - 1;
    return keys.first <= steps.key0(j, 0) &&
           (to_end || steps.key0(j, LAST) + MASK_TILE <= keys.end) && !steps.lacks(j, LAST);
  }

  // Zeros for the values of keys that are not there. All consumers come here, with the same step.
  __device__ __forceinline__ void clear_values(const FwdSm90Work& work, int j, int stage) const {
    constexpr int THREADS = Config::CONSUMERS * WARPGROUP;
    const int thread = fresh_thread() - WARPGROUP;
    const uint32_t tile = shared_address(smem.v[stage]);
    const Steps steps{work.bounds};
    if (!steps.is_list()) {
      clear_rows<KTile, BLOCK_N, Config::V_PANELS, THREADS>(tile, from(work.keys, steps.key0(j)),
                                                            thread);
    } else {
#pragma unroll 1
      for (int part = 0; part < Steps::PARTS; ++part) {
        const RowSpan keep =
            steps.lacks(j, part) ? RowSpan{0, 0} : from(work.keys, steps.key0(j, part));
        clear_rows<KTile, MASK_TILE, Config::V_PANELS, THREADS>(
            tile + part * MASK_TILE * KTile::ROW_BYTES, keep, thread);
      }
    }
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, THREADS);
  }

  // Rows of a tile whose first is key key0.
  __device__ __forceinline__ static RowSpan from(const RowSpan& keys, int key0) {
    return {keys.first - key0, keys.end - key0};
  }
};

}  // namespace flash_dist

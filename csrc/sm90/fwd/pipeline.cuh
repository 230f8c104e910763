// The pipeline steps of a warpgroup of the forward kernel for Hopper (consumer.cuh).
#pragma once

#include "core/max_logit.cuh"
#include "core/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/maximum.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/dropout.cuh"
#include "sm90/fwd/bias.cuh"
#include "sm90/fwd/softmax.cuh"
#include "sm90/fwd/tiles.cuh"
#include "sm90/rows.cuh"

namespace flash_dist {

// Attention of one warpgroup's 64 queries of a tile: the state, and the steps over blocks of keys.
template <class Tiles>
struct FwdSm90Pipeline {
  using Target = typename Tiles::Target;
  using T = typename Tiles::T;
  using KTile = typename Tiles::KTile;
  using QTile = typename Tiles::QTile;
  using Steps = typename Tiles::Steps;
  static constexpr int BLOCK_N = Tiles::BLOCK_N;
  using Output = Accumulator<1, Tiles::HEAD_DIM_V / 8>;
  using Probabilities = uint32_t[BLOCK_N / 16][1][4];  // A operands of P @ V

  // NOTE: arrays are not members of the pipeline. The compiler keeps an object in registers only if
  // it knows all indices into it before it unrolls loops, and the indices into arrays are known
  // only afterwards.
  struct Fragments {
    Accumulator<1, BLOCK_N / 8> s;
    Probabilities p;
    float rescale[1][2];
    VisibleKeys<BLOCK_N, Tiles::SOURCE> visible;
    typename Tiles::BiasFragment bias;
    // Used if FINDS_MAX_LOGIT. largest: the largest score that this lane has compared. bound: if a
    // score is larger than all scores known so far, score * scale_log2 exceeds this bound.
    float largest, bound;
  };

  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;
  const typename Tiles::Work& work;
  Output& o;
  SoftmaxState<1>& softmax;
  Fragments& f;
  const float scale_log2;
  const float slope;  // ALiBi slope
  struct KeepsAll {};
  const std::conditional_t<Tiles::DROPS, QueryDropout, KeepsAll> dropout;
  const typename Tiles::Queries queries;
  const uint64_t a_q;
  typename Tiles::Keys keys;      // the stage of K for the next scores
  typename Tiles::Keys previous;  // the stage of V for the next product with P, one block behind K
  bool clean = true;              // is_clean() of the previous block
  int j;                          // the current block of keys

  __device__ __forceinline__ FwdSm90Pipeline(const typename Tiles::Params& params_,
                                             typename Tiles::Smem& smem_,
                                             const typename Tiles::Work& work_, Output& o_,
                                             SoftmaxState<1>& softmax_, Fragments& f_)
      : params(params_),
        smem(smem_),
        work(work_),
        o(o_),
        softmax(softmax_),
        f(f_),
        scale_log2(Tiles::HAS_BIAS        ? LOG2_E
                   : Tiles::HAS_SCORE_MOD ? 1.0f
                                          : params.p.softmax_scale * LOG2_E),
        slope(slope_of(params, work)),
        dropout(make_dropout(params, work)),
        queries{work.queries},
        a_q(QTile::by_rows(
            uniform(shared_address(smem.q[queries.stage()]) + consumer() * 64 * QTile::ROW_BYTES))),
        keys{work.tiles},
        j(work.bounds.end - 1) {}

  // Returns the bounds of this warpgroup's steps. Without SKIPS_STEPS, these are all steps of the
  // tile.
  __device__ __forceinline__ const StepBounds& own() const {
    if constexpr (Tiles::SKIPS_STEPS) return work.own[consumer()];
    return work.bounds;
  }

  // Skips the steps down to `end`, which are masked for all of this warpgroup's queries. NOTE:
  // waits for each stage's data before releasing the stage. Otherwise the release would count for
  // an earlier round of the ring.
  __device__ __forceinline__ void skip_to(int end) {
#pragma unroll 1
    for (; j >= end; --j) {
      smem.k_barriers.wait_for_data(keys);
      smem.k_barriers.release(keys.stage());
      smem.v_barriers.wait_for_data(keys);
      if (!is_clean(j)) clear_values(j, keys.stage());
      smem.v_barriers.release(keys.stage());
      keys.advance();
    }
  }

  // Skips all steps.
  __device__ __forceinline__ void skip_all() {
    smem.q_barriers.wait_for_data(queries);
    skip_to(work.bounds.begin);
    smem.q_barriers.release(queries.stage());
  }

  // Returns the index of this warp's first query in the tile.
  __device__ __forceinline__ static int warp_row() {
    return consumer() * 64 + warp_of_consumer() * 16;
  }

  // Computes P of the last block, which is processed first. The next step adds the block's values.
  // If the keys are a range of several blocks, and at most TAIL_N keys of the last one exist, adds
  // these keys at once and continues with the block before.
  __device__ __forceinline__ void first_step() {
    const StepBounds& bounds = own();
    smem.q_barriers.wait_for_data(queries);
    smem.k_barriers.wait_for_data(keys);
    bool has_tail = false;
    if constexpr (Tiles::TAIL_N > 0) {
      has_tail = !Steps{work.bounds}.is_list() && j > bounds.begin &&
                 work.keys.end - j * BLOCK_N <= Tiles::TAIL_N;
      if (has_tail) add_tail();
    }
    issue_scores(f.s);
    fetch_bias();
    wait_for_scores<0>(f.s);
    const bool masked = j >= bounds.full_end || j < bounds.full_begin;
    modify_scores(f.s, j);
    if (masked) {
      mask_scores();
      clean = is_clean(j);
    }
    const bool grown = weigh();
    share_largest();
    if (has_tail && __any_sync(0xffffffffu, grown)) rescale_rows(o, f.rescale);
    to_operands(f.p, f.s, j);
    previous = keys;
    keys.advance();
    if (j > bounds.begin) smem.k_barriers.wait_for_data(keys);
  }

  // Computes S and P of one block, while the product with the previous block's values runs.
  template <bool MASKED>
  __device__ __forceinline__ void step() {
    begin_step<MASKED>(j, f.p);
    modify_scores(f.s, j);
    if constexpr (MASKED && Tiles::LOOKS_AHEAD) f.visible.apply(f.s, Steps{work.bounds}, j);
    if constexpr (MASKED && !Tiles::LOOKS_AHEAD) mask_scores();
    clean = !MASKED || is_clean(j);
    const bool grown = weigh();
    hold(f.s.x[0]);
    end_step(j, f.p);
    to_operands(f.p, f.s, j);
    // A factor of 1 changes nothing, so skipping the rescaling changes no bit.
    if (__any_sync(0xffffffffu, grown)) rescale_rows(o, f.rescale);
  }

  // Runs the steps of two blocks without a mask, in which most likely no row maximum grows.
  __device__ __forceinline__ void two_fast_steps() {
    Probabilities next;
    float known;
    if constexpr (Tiles::FINDS_MAX_LOGIT) known = load_relaxed(max_logit());
    fast_step(j, f.p, next);
    if constexpr (Tiles::FINDS_MAX_LOGIT) f.bound = fmaxf(f.bound, bound_of(known));
    fast_step(j - 1, next, f.p);
  }

  // Returns the largest score of this lane's rows, or NaN if a score is NaN: the row's sum is then
  // NaN. NOTE: a score of infinity also makes the sum NaN. Then infinity is returned.
  __device__ __forceinline__ float largest() const {
    float x = f.largest;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = softmax.row_sum[0][h];
      if (x < INFINITY && sum != sum && exists(h)) x = sum;
    }
    return x;
  }

  // Adds the values of the last block.
  __device__ __forceinline__ void finish() {
    smem.q_barriers.release(queries.stage());
    add_values(own().begin, f.p);
    wait_for_output(previous.stage());
  }

  // Returns the address of the head's largest score so far over all warps. The stored value
  // includes the factor softmax_scale.
  __device__ __forceinline__ float* max_logit() const { return params.max_logit + work.block.head; }

  // Returns max_logit on the scale of S * scale_log2, less a margin above all rounding errors.
  __device__ __forceinline__ static float bound_of(float max_logit) {
    const float x = max_logit * LOG2_E;
    return x - fmaf(fabsf(x), 0x1p-20f, 0x1p-11f);
  }

 private:
  __device__ __forceinline__ static float slope_of(const typename Tiles::Params& params,
                                                   const typename Tiles::Work& work) {
    if constexpr (!Tiles::HAS_SCORE_MOD) return 0.0f;
    return minus_alibi_slope(params.p.scores, work.block.batch, work.block.head);
  }

  __device__ __forceinline__ static auto make_dropout(const typename Tiles::Params& params,
                                                      const typename Tiles::Work& work) {
    if constexpr (Tiles::DROPS) {
      const FwdBlock& block = work.block;
      return QueryDropout(params.dropout, sequence_head(params.p, block.batch, block.head),
                          block.row0 + warp_row());
    } else {
      return KeepsAll{};
    }
  }

  // Returns f(p, k), which drops weights of the keys 16 * k to 16 * k + 15 of block i.
  __device__ __forceinline__ auto drop_in(int i) const {
    if constexpr (Tiles::DROPS) {
      const StepKeys<Steps> first(Steps{work.bounds}, i);
      return [this, first](uint32_t (&p)[1][4], int k) { dropout.drop(p[0], first[k * 16]); };
    } else {
      return [](uint32_t (&)[1][4], int) {};
    }
  }

  // Adds the first TAIL_N keys of the last block. The block's other keys do not exist.
  __device__ __forceinline__ void add_tail() {
    Accumulator<1, Tiles::TAIL_N / 8> s;
    uint32_t p[Tiles::TAIL_N / 16][1][4];
    float rescale[1][2];
    issue_scores(s);
    wait_for_scores<0>(s);
    const int row = work.block.row0 + warp_row() + fresh_thread() % 32 / 4;
    const Mask mask(params.p.mask, work.place);
    const int2 ranges[2] = {mask.keys(row), mask.keys(row + 8)};
    mask_ranges(s, ranges, j * BLOCK_N);
    weigh(s, rescale);
    to_operands(p, s, j);
    smem.v_barriers.wait_for_data(keys);
    if (!is_clean(j)) clear_values(j, keys.stage());
    issue_values(p, keys.stage());
    wait_for_output(keys.stage());
    keys.advance();
    --j;
    smem.k_barriers.wait_for_data(keys);
  }

  // Computes S of block i, while the product with the previous block's values runs.
  template <bool MASKED>
  __device__ __forceinline__ void begin_step(int i, Probabilities& p) {
    issue_scores(f.s);
    add_values(i + 1, p);
    if constexpr (MASKED && Tiles::LOOKS_AHEAD) {
      f.visible.find(Mask(params.p.mask, work.place), Steps{work.bounds}, i, consumer(),
                     work.block.row0 + warp_row());
    }
    fetch_bias();
    wait_for_scores<1>(f.s);
  }

  // Issues the product with the values of block i, the previous block.
  __device__ __forceinline__ void add_values(int i, Probabilities& p) {
    smem.v_barriers.wait_for_data(previous);
    if (!clean) clear_values(i, previous.stage());
    issue_values(p, previous.stage());
  }

  // Waits for the product with the previous block's values, and for the next K.
  __device__ __forceinline__ void end_step(int i, Probabilities& p) {
    const int read = previous.stage();
    previous = keys;
    keys.advance();
    // NOTE: this branch also keeps ptxas from moving exponentials behind the next wait.
    if (i > own().begin) smem.k_barriers.wait_for_data(keys);
    wgmma_wait<0>();
    hold(o.x[0]);
    hold(p);
    smem.v_barriers.release(read);
  }

  // Runs the step of block i, which needs no mask. p: the probabilities of the previous block.
  // next: receives those of block i.
  __device__ __forceinline__ void fast_step(int i, Probabilities& p, Probabilities& next) {
    begin_step<false>(i, p);
    modify_scores(f.s, i);
    clean = true;
    bool grown = false;
    if (!try_operands(next, i)) {
      grown = weigh();
      to_operands(next, f.s, i);
    }
    hold(next);
    end_step(i, p);
    if (__any_sync(0xffffffffu, grown)) rescale_rows(o, f.rescale);
  }

  // S = Q @ K.T                                   [64, BLOCK_N], or the first NT * 8 keys
  template <int NT>
  __device__ __forceinline__ void issue_scores(Accumulator<1, NT>& s) const {
    const uint64_t b_k = KTile::by_rows(shared_address(smem.k[keys.stage()]));
    wgmma_fence();
    wgmma<T, false, false, true>(s.x[0], a_q, b_k);
#pragma unroll
    for (int k = 1; k < Tiles::HEAD_DIM / 16; ++k) {
      wgmma<T, false, false>(s.x[0], a_q + QTile::rows_step(k), b_k + KTile::rows_step(k));
    }
    wgmma_commit();
  }

  // Waits for the scores. PENDING: the number of products that were issued after the scores.
  template <int PENDING, int NT>
  __device__ __forceinline__ void wait_for_scores(Accumulator<1, NT>& s) const {
    wgmma_wait<PENDING>();
    hold(s.x[0]);
    smem.k_barriers.release(keys.stage());
  }

  // Loads a block's bias into registers.
  __device__ __forceinline__ void fetch_bias() const {
    if constexpr (Tiles::HAS_BIAS) {
      FwdSm90Bias<Tiles>{params, smem, keys}.fetch(f.bias, warp_row());
    }
  }

  // Applies the soft cap and ALiBi, or the bias, to the scores of block i.
  __device__ __forceinline__ void modify_scores(Accumulator<1, BLOCK_N / 8>& s, int i) const {
    if constexpr (Tiles::HAS_BIAS) {
      FwdSm90Bias<Tiles>{params, smem, keys}.add(s, f.bias);
    }
    if constexpr (Tiles::HAS_SCORE_MOD) {
      const Steps steps{work.bounds};
      const int row0 = work.block.row0 + warp_row() + work.place.seqlen_k - work.place.seqlen_q;
      apply_score_mod(s, params.score_mod, params.p.scores.alibi != nullptr, slope, row0,
                      [&](int n) { return steps.key(i, n * 8); });
    }
  }

  // Updates the largest score so far with all scores in f.s. NOTE: max.NaN is not used, because
  // ptxas would then serialize the products.
  __device__ __forceinline__ void find_largest() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < BLOCK_N / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) top = fmaxf(top, f.s.x[0][n][2 * h + e]);
      see_top(h, top);
    }
    hold(f.largest);
  }

  // Updates the largest score so far with `top`, the largest of some scores of row h.
  __device__ __forceinline__ void see_top(int h, float top) {
    if (exists(h)) f.largest = fmaxf(f.largest, top);
  }

  // Publishes this warp's largest score to all blocks if it exceeds all scores known so far.
  __device__ __forceinline__ void share_largest() {
    if constexpr (Tiles::FINDS_MAX_LOGIT) {
      const float own = f.largest * params.p.softmax_scale;
      if (!__any_sync(0xffffffffu, bound_of(own) > f.bound)) return;
      f.bound = bound_of(raise_max_logit<Target>(max_logit(), own));
    }
  }

  // Returns the P below which no score of row h can exceed the largest so far.
  __device__ __forceinline__ float least_probability(int h) const {
    return exp2_approx(f.bound - softmax.row_max[0][h] * scale_log2);
  }

  // Returns whether a score may exceed the largest so far, according to rounded P.
  __device__ __forceinline__ bool may_be_larger(const Probabilities& p) const {
    bool may = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t top = p[0][0][h];
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) {
        top = max_bf16x2(top, max_bf16x2(p[k][0][h], p[k][0][h + 2]));
      }
      const float least = least_probability(h);
      const float2 x = unpack<T>(top);
      may |= fmaxf(x.x, x.y) >= unpack<T>(pack<Target, T>(least, least)).x;
    }
    return may;
  }

  // Returns whether row h of this lane exists. Rows that do not exist also have scores, computed
  // from zeros or from queries of the next sequence.
  __device__ __forceinline__ bool exists(int h) const {
    return work.block.row0 + warp_row() + fresh_thread() % 32 / 4 + 8 * h < work.sequence.seqlen_q;
  }

  // Computes rounded P from S with the row maxima so far. Returns false, without a result, if a
  // maximum may have to grow or if is_bounded().
  __device__ __forceinline__ bool try_operands(Probabilities& next, int i) {
    if constexpr (Tiles::HAS_SCORE_MOD) {
      if (is_bounded()) return false;
    }
    constexpr float SMALL[2] = {SURELY_SMALL, SURELY_SMALL};
    float sum[2];
    if constexpr (!Tiles::FINDS_MAX_LOGIT) {
      return try_probabilities<Target, T>(next, sum, f.s, softmax, scale_log2, SMALL, drop_in(i));
    } else {
      return try_with_max_logit(next, i, sum, SMALL);
    }
  }

  // Computes rounded P like try_operands(), and updates the largest score so far if a rounded P may
  // belong to a larger score. No P exceeds its row's sum, so at head_dim 64 the sums are tested
  // first: with 16384 keys on an H200, a call then takes 1.03 to 1.09 times as long as without
  // max_logit, instead of 1.13. At head_dim 128, P is tested in each step: a call takes about 1.08
  // times as long either way, but 1.06 instead of 1.15 if all scores are nearly equal.
  __device__ __forceinline__ bool try_with_max_logit(Probabilities& next, int i, float (&sum)[2],
                                                     const float (&small)[2]) {
    const auto drop = drop_in(i);
    if constexpr (Tiles::HEAD_DIM <= 64) {
      const float less[2] = {fminf(SURELY_SMALL, least_probability(0)),
                             fminf(SURELY_SMALL, least_probability(1))};
      if (try_probabilities<Target, T>(next, sum, f.s, softmax, scale_log2, less, drop))
        return true;
      if (!add_sums(softmax, sum, small)) return false;
      if (!__any_sync(0xffffffffu, may_be_larger(next))) return true;
    } else {
      const float none[2] = {-1.0f, -1.0f};  // all sums exceed this limit, so none is added yet
      try_probabilities<Target, T>(next, sum, f.s, softmax, scale_log2, none, drop);
      const float less[2] = {may_be_larger(next) ? -1.0f : SURELY_SMALL, SURELY_SMALL};
      if (add_sums(softmax, sum, less)) return true;
      if (!add_sums(softmax, sum, small)) return false;
    }
    find_largest();
    share_largest();
    return true;
  }

  // Returns whether score_mod.top is subtracted from the scores instead of the row maxima.
  __device__ __forceinline__ bool is_bounded() const { return params.score_mod.top != 0.0f; }

  // Computes P from S. Returns whether a row maximum has grown.
  __device__ __forceinline__ bool weigh() {
    if constexpr (Tiles::HAS_SCORE_MOD) {
      if (is_bounded()) {
        make_bounded_probabilities(f.s, softmax);
        return false;
      }
    }
    return weigh(f.s, f.rescale);
  }

  // Computes P from the scores of NT * 8 keys, from which score_mod.top has not been subtracted.
  // Returns whether a row maximum has grown.
  template <int NT>
  __device__ __forceinline__ bool weigh(Accumulator<1, NT>& s, float (&rescale)[1][2]) {
    if constexpr (!Tiles::FINDS_MAX_LOGIT) {
      return make_probabilities(s, softmax, rescale, scale_log2);
    } else {
      return make_probabilities(s, softmax, rescale, scale_log2,
                                [&](int h, float top) { see_top(h, top); });
    }
  }

  __device__ __forceinline__ void mask_scores() const {
    f.visible.find_and_apply(f.s, Mask(params.p.mask, work.place), Steps{work.bounds}, j,
                             consumer(), work.block.row0 + warp_row());
  }

  // Rounds the weights of block i to A operands, and applies dropout to them.
  template <int KT>
  __device__ __forceinline__ void to_operands(uint32_t (&p)[KT][1][4],
                                              const Accumulator<1, KT * 2>& s, int i) const {
    const auto drop = drop_in(i);
#pragma unroll
    for (int k = 0; k < KT; ++k) {
      to_a_operand<Target, T>(p[k], s, k);
      drop(p[k], k);
    }
  }

  // O += P @ V                                              [64, HEAD_DIM_V]
  template <int KT>
  __device__ __forceinline__ void issue_values(uint32_t (&p)[KT][1][4], int stage) {
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

  __device__ __forceinline__ void wait_for_output(int stage) const {
    wgmma_wait<0>();
    hold(o.x[0]);
    smem.v_barriers.release(stage);
  }

  // Returns whether the values of block i need no clearing: all its keys exist, or the missing ones
  // are beyond the end of the tensor, where TMA has loaded zeros.
  __device__ __forceinline__ bool is_clean(int i) const {
    const FwdParams& p = params.p;
    const RowSpan& keys = work.keys;
    const Steps steps{work.bounds};
    const bool to_end = p.packing.cu_seqlens_q == nullptr && keys.end == p.seqlen_k;
    if (!steps.is_list()) {
      return keys.first <= steps.key0(i) && (to_end || steps.key0(i) + BLOCK_N <= keys.end);
    }
    // The tiles of a list are in ascending order: the first part has the first keys, and the last
    // part has the last keys.
    constexpr int LAST = Steps::PARTS == 0 ? 0 : Steps::PARTS - 1;
    return keys.first <= steps.key0(i, 0) &&
           (to_end || steps.key0(i, LAST) + MASK_TILE <= keys.end) && !steps.lacks(i, LAST);
  }

  // Zeroes the values of keys that do not exist. All consumers must call this for the same block.
  __device__ __forceinline__ void clear_values(int i, int stage) const {
    constexpr int THREADS = Tiles::CONSUMERS * WARPGROUP;
    const int thread = fresh_thread() - WARPGROUP;
    const uint32_t tile = shared_address(smem.v[stage]);
    const Steps steps{work.bounds};
    if (!steps.is_list()) {
      clear_rows<KTile, BLOCK_N, Tiles::V_PANELS, THREADS>(tile, from(work.keys, steps.key0(i)),
                                                           thread);
    } else {
#pragma unroll 1
      for (int part = 0; part < Steps::PARTS; ++part) {
        const RowSpan keep =
            steps.lacks(i, part) ? RowSpan{0, 0} : from(work.keys, steps.key0(i, part));
        clear_rows<KTile, MASK_TILE, Tiles::V_PANELS, THREADS>(
            tile + part * MASK_TILE * KTile::ROW_BYTES, keep, thread);
      }
    }
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, THREADS);
  }

  // Returns the range `keys`, counted from key0, the first key of a tile.
  __device__ __forceinline__ static RowSpan from(const RowSpan& keys, int key0) {
    return {keys.first - key0, keys.end - key0};
  }
};

}  // namespace flash_dist

// A consumer warpgroup of the forward kernel for Hopper. For 64 queries of each tile it computes
//
//   S = Q @ K(last).T; P = softmax
//   for j from the block before the last down to the first:
//     issue S = Q @ K(j).T, then O += P @ V(j + 1)
//     wait for S
//     while the second product runs: soft cap, ALiBi, bias, mask; P = exp2(S - max), sums
//     wait for O; rescale it
//   O += P @ V(first)
#pragma once

#include <type_traits>

#include "sm90/fwd/output.cuh"
#include "sm90/fwd/pipeline.cuh"

namespace flash_dist {

template <class Tiles>
struct FwdSm90Consumer {
  using Pipeline = FwdSm90Pipeline<Tiles>;
  using Output = FwdSm90Output<typename Tiles::Config>;

  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;

  __device__ __forceinline__ void run() const { consume_works<typename Tiles::Config>(*this); }

  __device__ __forceinline__ void compute(const typename Tiles::Work& work) const {
    typename Pipeline::Output o;
    o.clear();
    SoftmaxState<1> softmax;
    softmax.clear();
    if constexpr (Tiles::HAS_SCORE_MOD) {
      if (params.score_mod.top != 0.0f) {
        softmax.row_max[0][0] = softmax.row_max[0][1] = params.score_mod.top;
      }
    }
    mainloop(work, o, softmax);
    const FwdParams& p = params.p;
    const int row = work.block.row0 + Pipeline::warp_row();
    float* lse = p.lse + lse_begin(p, work.block.batch, work.block.head, work.sequence.q0) + row;
    const float* sink = p.sinks == nullptr ? nullptr : p.sinks + work.block.head;
    normalize_rows(o, softmax, lse, fresh_thread() % 32, work.sequence.seqlen_q - row,
                   Tiles::HAS_BIAS        ? 1.0f
                   : Tiles::HAS_SCORE_MOD ? LN_2
                                          : p.softmax_scale,
                   sink);
    if constexpr (Tiles::DROPS) o.scale(params.dropout.scale);
    Output{params, smem, work}.store(o);
  }

 private:
  // The main loop, from the last block of keys to the first.
  __device__ __forceinline__ void mainloop(const typename Tiles::Work& work,
                                           typename Pipeline::Output& o,
                                           SoftmaxState<1>& softmax) const {
    typename Pipeline::Fragments fragments;
    Pipeline pipeline(params, smem, work, o, softmax, fragments);
    if constexpr (Tiles::FINDS_MAX_LOGIT) {
      fragments.largest = -INFINITY;
      fragments.bound = Pipeline::bound_of(load_relaxed(pipeline.max_logit()));
    }
    const StepBounds& bounds = pipeline.own();
    int& j = pipeline.j;
    const auto step = [&](auto masked) { pipeline.template step<decltype(masked)::value>(); };

    if constexpr (Tiles::SKIPS_STEPS) {
      if (bounds.begin == bounds.end) return pipeline.skip_all();
      pipeline.skip_to(bounds.end);
    }
    pipeline.first_step();
    --j;
    if constexpr (Tiles::SOURCE == KeySource::LISTS) {
#pragma unroll 1
      for (; j >= 0; --j) step(std::true_type{});
    } else {
      // Runs the steps down to full_end with a mask, then those down to full_begin without one,
      // then the rest with a mask.
#pragma unroll 1
      for (int round = 0; round < 2; ++round) {
#pragma unroll 1
        for (; j >= (round == 0 ? bounds.full_end : bounds.begin); --j) step(std::true_type{});
        if constexpr (Tiles::KEEP_S) {
#pragma unroll 1
          for (; j > bounds.full_begin; j -= 2) pipeline.two_fast_steps();
        }
#pragma unroll 1
        for (; j >= bounds.full_begin; --j) step(std::false_type{});
      }
    }
    pipeline.finish();
    if constexpr (Tiles::FINDS_MAX_LOGIT) {
      // Atomics on one address are serialized, so a warp skips its atomic if max_logit is known to
      // be at least the warp's largest score. NOTE: the comparison is false for NaN.
      const float own = pipeline.largest() * params.p.softmax_scale;
      if (__any_sync(0xffffffffu, !(own * LOG2_E <= fragments.bound))) {
        raise_max_logit<typename Tiles::Target>(pipeline.max_logit(), own);
      }
    }
    if constexpr (Tiles::SKIPS_STEPS) pipeline.skip_to(work.bounds.begin);
  }
};

}  // namespace flash_dist

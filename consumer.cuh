// A warpgroup of the forward kernel for Hopper that computes: 64 queries of one tile after the other.
//
//   S = Q @ K(last).T; P = softmax
//   for j from the block before the last down to the first:
//     issue S = Q @ K(j).T, then O += P @ V(j + 1)
//     wait for S; soft cap, ALiBi, mask; P = exp2(S - max), sums   while the second product runs
//     wait for O; rescale it
//   O += P @ V(first)
#pragma once

#include "core/uncovered.cuh"
#include "sm90/fwd/output.cuh"
#include "sm90/fwd/pipeline.cuh"

namespace flash_dist {

template <class Tiles>
struct FwdSm90Consumer {
  using Pipeline = FwdSm90Pipeline<Tiles>;
  using Output = FwdSm90Output<typename Tiles::Config>;

  const typename Tiles::Params& params;
  typename Tiles::Smem& smem;

  __device__ __forceinline__ void run() const {
    typename Tiles::Works works;
#pragma unroll 1
    while (true) {
      smem.work_barriers.wait_for_data(works);
      const FwdSm90Work& work = smem.work[works.stage()];
      if (work.is_closed()) break;
      if (work.sequence.uncovered_q) {
        fill_uncovered<typename Tiles::Config, 2, WARPGROUP>(params.p, work.block);
      }
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
    typename Pipeline::Output o;
    o.clear();
    SoftmaxState<1> softmax;
    softmax.clear();
    add_all_keys(work, o, softmax);
    const FwdParams& p = params.p;
    const int row = work.block.row0 + Pipeline::warp_row();
    float* lse = p.lse + lse_begin(p, work.block.batch, work.block.head, work.sequence.q0) + row;
    const float* sink = p.sinks == nullptr ? nullptr : p.sinks + work.block.head;
    normalize_rows(o, softmax, lse, fresh_thread() % 32, work.sequence.seqlen_q - row,
                   Tiles::BENDS ? LN_2 : p.softmax_scale, sink);
    Output{params, smem, work}.store(o);
  }

  // The main loop, from the last block of keys to the first.
  __device__ __forceinline__ void add_all_keys(const FwdSm90Work& work,
                                               typename Pipeline::Output& o,
                                               SoftmaxState<1>& softmax) const {
    const KeyBounds& bounds = work.bounds;
    typename Pipeline::Fragments fragments;
    Pipeline pipeline(params, smem, work, o, softmax, fragments);
    int& j = pipeline.j;
    pipeline.first_step();
    --j;
    if constexpr (Tiles::WALK == Walk::LISTS) {
#pragma unroll 1
      for (; j >= 0; --j) pipeline.template step<true>();
    } else {
      // Blocks with a mask, blocks without one, blocks with a mask.
#pragma unroll 1
      for (int round = 0; round < 2; ++round) {
#pragma unroll 1
        for (; j >= (round == 0 ? bounds.full_end : bounds.begin); --j) {
          pipeline.template step<true>();
        }
        if constexpr (Tiles::KEEP_S) {
#pragma unroll 1
          for (; j > bounds.full_begin; j -= 2) pipeline.two_fast_steps();
        }
#pragma unroll 1
        for (; j >= bounds.full_begin; --j) pipeline.template step<false>();
      }
    }
    pipeline.finish();
  }
};

}  // namespace flash_dist

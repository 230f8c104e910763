// The softmax of 16 rows of a warp, in the forward kernel for Hopper.
//
// A row's maximum is updated lazily, only if P would otherwise exceed 2^12. P, its sums and O may
// thus be 2^12 times as large; fp16 represents such a P without losing precision. O is then seldom
// rescaled, and a step without a large P need not find a maximum: try_probabilities() uses the
// previous one. A row's result depends on its own scores only, whichever branch its warp takes.
#pragma once

#include "core/accumulator.cuh"
#include "core/softmax.cuh"

namespace flash_dist {

constexpr float MAXIMUM_MARGIN = 12.0f;  // log2 of the largest P without a new maximum
constexpr float SURELY_SMALL = 2048.0f;  // a sum up to this contains no P above 2^MAXIMUM_MARGIN

struct SeeNothing {
  __device__ __forceinline__ void operator()(int, float) const {}
};

// Computes P = exp2((S - row_max) * scale_log2) and rescales the sums. Returns whether a maximum
// has grown: the caller then multiplies O by `rescale`, which is 1 for rows whose maximum stays.
// see_top(h, top) receives the maximum of row h so far, including these scores.
template <int NT, class SeeTop = SeeNothing>
__device__ __forceinline__ bool make_probabilities(Accumulator<1, NT>& s, SoftmaxState<1>& state,
                                                   float (&rescale)[1][2], float scale_log2,
                                                   SeeTop see_top = {}) {
  bool grown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float& row_max = state.row_max[0][h];
    float top = row_max;
#pragma unroll
    for (int n = 0; n < NT; ++n) top = fmaxf(top, fmaxf(s.x[0][n][2 * h], s.x[0][n][2 * h + 1]));
    top = quad_max(top);
    see_top(h, top);
    // NOTE: the comparison is false for NaN, so that a row's first score becomes its maximum even
    // if the scale is 0.
    if ((top - row_max) * scale_log2 <= MAXIMUM_MARGIN) top = row_max;
    // NOTE: a row without a visible key so far keeps -inf. An offset of 0 then avoids inf - inf.
    const float offset = top == -INFINITY ? 0.0f : top * scale_log2;
    const bool grew = top != row_max;
    rescale[0][h] = exp2_approx(grew ? fmaf(row_max, scale_log2, -offset) : 0.0f);
    grown |= grew;
    row_max = top;
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s.x[0][n][2 * h + e];
        x = exp2_approx(fmaf(x, scale_log2, -offset));
        sum += x;
      }
    state.row_sum[0][h] = fmaf(state.row_sum[0][h], rescale[0][h], sum);
  }
  return grown;
}

// Computes P = exp2(S) and adds it to the sums. FwdScoreModParams::top has been subtracted from S
// instead of the row maxima.
template <int NT>
__device__ __forceinline__ void make_bounded_probabilities(Accumulator<1, NT>& s,
                                                           SoftmaxState<1>& state) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s.x[0][n][2 * h + e];
        x = exp2_approx(x);
        sum += x;
      }
    state.row_sum[0][h] += sum;
  }
}

// Adds the sums of P to the row sums and returns true. If a sum of any lane of the warp exceeds its
// limit, adds nothing and returns false.
__device__ __forceinline__ bool add_sums(SoftmaxState<1>& state, const float (&sum)[2],
                                         const float (&limit)[2]) {
  const bool small = sum[0] <= limit[0] && sum[1] <= limit[1];
  if (!__all_sync(0xffffffffu, small)) return false;
  state.row_sum[0][0] += sum[0];
  state.row_sum[0][1] += sum[1];
  return true;
}

// Computes rounded P from the maxima so far, and keeps S. Returns false if a sum exceeds its limit,
// as a maximum may have to grow. Only p and sum have then changed, and the caller must call
// add_sums() or make_probabilities(). drop(p[k], k) drops weights.
template <class Target, class T, int NT, class Drop>
__device__ __forceinline__ bool try_probabilities(uint32_t (&p)[NT / 2][1][4], float (&sum)[2],
                                                  const Accumulator<1, NT>& s,
                                                  SoftmaxState<1>& state, float scale_log2,
                                                  const float (&limit)[2], const Drop& drop) {
  // A row without a maximum has an offset of -inf. Its P and their sum are then inf or NaN, and
  // add_sums() returns false.
  const float offset[2] = {state.row_max[0][0] * scale_log2, state.row_max[0][1] * scale_log2};
  sum[0] = sum[1] = 0.0f;
#pragma unroll
  for (int k = 0; k < NT / 2; ++k) {
    Accumulator<1, 2> part;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = exp2_approx(fmaf(s.x[0][2 * k + n][i], scale_log2, -offset[i / 2]));
        part.x[0][n][i] = x;
        sum[i / 2] += x;
      }
    to_a_operand<Target, T>(p[k], part, 0);
    drop(p[k], k);
  }
  return add_sums(state, sum, limit);
}

}  // namespace flash_dist

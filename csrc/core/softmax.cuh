// Online softmax: scores arrive key block by key block.
#pragma once

#include "core/accumulator.cuh"
#include "core/combine.cuh"
#include "core/scores.cuh"
#include "ptx/convert.cuh"

namespace flash_dist {

// Running maximum and sum of the two rows that a lane holds in each 16-row tile.
template <int MT>
struct SoftmaxState {
  float row_max[MT][2];
  float row_sum[MT][2];  // sum over this lane's columns; quad_sum() adds the other lanes

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) row_max[m][h] = -INFINITY, row_sum[m][h] = 0.0f;
  }
};

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// How to compute the factor that rescales O and the sums when a row maximum grows. The offset,
// maximum * scale_log2, is rounded. With scores in the hundreds this rounding changes P by 2^-16,
// in the same direction for the whole row until the maximum grows again. ROUNDED computes the
// factor from the rounded offsets, with which P was computed. EXACT does not round the offset of
// the previous maximum, which is accurate enough for a 16-bit P.
enum class Offsets { EXACT, ROUNDED };

template <Offsets OFFSETS>
__device__ __forceinline__ float change_of(float row_max, float scale_log2, float offset) {
  if constexpr (OFFSETS == Offsets::EXACT) return fmaf(row_max, scale_log2, -offset);
  return __fsub_rn(__fmul_rn(row_max, scale_log2), offset);
}

// Returns the maximum of `top` and all scores of the lane's row h (0 or 1) in row tile m.
template <int MT, int NT>
__device__ __forceinline__ float find_top(const Accumulator<MT, NT>& s, float top, int m, int h) {
#pragma unroll
  for (int n = 0; n < NT; ++n) top = fmaxf(top, fmaxf(s.x[m][n][2 * h], s.x[m][n][2 * h + 1]));
  return quad_max(top);
}

// S -> P = exp2((S - row_max) * scale_log2). Rescales the sums, and sets `rescale` to the factors
// of O: exactly 1 for rows whose maximum stays. Returns true if a maximum has grown: the caller
// then rescales O. top_of(m, h) returns the new maximum of a row.
template <Offsets OFFSETS, int MT, int NT, class TopOf>
__device__ __forceinline__ bool to_probabilities(Accumulator<MT, NT>& s, SoftmaxState<MT>& state,
                                                 float (&rescale)[MT][2], float scale_log2,
                                                 TopOf top_of) {
  bool grown = false;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float top = top_of(m, h);
      // NOTE: without a visible key the maximum is still -inf; 0 avoids inf - inf.
      const float offset = top == -INFINITY ? 0.0f : top * scale_log2;
      // NOTE: if the maximum stays, change_of<EXACT>() would not give exactly 0: its fma uses the
      // unrounded product, but the offset is rounded.
      const bool grew = top != state.row_max[m][h];
      rescale[m][h] =
          grew ? exp2_approx(change_of<OFFSETS>(state.row_max[m][h], scale_log2, offset)) : 1.0f;
      grown |= grew;
      state.row_max[m][h] = top;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s.x[m][n][2 * h + e];
          x = exp2_approx(fmaf(x, scale_log2, -offset));
          sum += x;
        }
      state.row_sum[m][h] = fmaf(state.row_sum[m][h], rescale[m][h], sum);
    }
  return grown;
}

template <int MT, int OT>
__device__ __forceinline__ void rescale_rows(Accumulator<MT, OT>& o,
                                             const float (&rescale)[MT][2]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < OT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o.x[m][n][i] *= rescale[m][i / 2];
}

// Converts S to P, and rescales O. top_of: see to_probabilities().
template <Offsets OFFSETS = Offsets::EXACT, int MT, int NT, int OT, class TopOf>
__device__ __forceinline__ void online_softmax(Accumulator<MT, NT>& s, Accumulator<MT, OT>& o,
                                               SoftmaxState<MT>& state, float scale_log2,
                                               TopOf top_of) {
  float rescale[MT][2];
  const bool grown = to_probabilities<OFFSETS>(s, state, rescale, scale_log2, top_of);
  // Skipped if all factors are 1: multiplying would not change a bit.
  if (__any_sync(0xffffffffu, grown)) rescale_rows(o, rescale);
}

// Converts S to P and rescales O, in a warp that has all scores of its rows.
template <Offsets OFFSETS = Offsets::EXACT, int MT, int NT, int OT>
__device__ __forceinline__ void online_softmax(Accumulator<MT, NT>& s, Accumulator<MT, OT>& o,
                                               SoftmaxState<MT>& state, float scale_log2) {
  online_softmax<OFFSETS>(s, o, state, scale_log2,
                          [&](int m, int h) { return find_top(s, state.row_max[m][h], m, h); });
}

// Divides O by sum, and stores lse = max * scale + ln(sum) for the first `rows` of the warp's rows.
// sink: address of the head's sink, or null. A row without a visible key gets O = 0, and lse = -inf
// or the sink.
template <int MT, int OT>
__device__ __forceinline__ void normalize_rows(Accumulator<MT, OT>& o,
                                               const SoftmaxState<MT>& state, float* lse, int lane,
                                               int rows, float scale, const float* sink) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = quad_sum(state.row_sum[m][h]);
      const bool empty = sum == 0.0f;  // no visible key
      float inverse = empty ? 0.0f : 1.0f / sum;
      float row_lse = empty ? -INFINITY : fmaf(state.row_max[m][h], scale, logf(sum));
      if (sink != nullptr) join_sink(*sink, row_lse, inverse);
      const int row = m * 16 + h * 8 + lane / 4;
      if (lane % 4 == 0 && row < rows) lse[row] = row_lse;
#pragma unroll
      for (int n = 0; n < OT; ++n) {
        o.x[m][n][2 * h] *= inverse;
        o.x[m][n][2 * h + 1] *= inverse;
      }
    }
}

// Converts scores S of a tile of latent keys to P = exp2(S * scale_log2 - top). The caller
// multiplies P by V before it reads the next tile. top and sum: running values of the lane's two
// rows; sum covers the lane's columns only. Sets `keep` to the factors of earlier keys and rescales
// sum; the caller rescales O.
template <int NT>
__device__ __forceinline__ void to_weights(Accumulator<1, NT>& s, float (&top)[2], float (&sum)[2],
                                           float (&keep)[2], float scale_log2) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float greatest = -INFINITY;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      greatest = fmaxf(greatest, fmaxf(s.x[0][n][2 * h], s.x[0][n][2 * h + 1]));
    }
    const Combine combine(top[h], __fmul_rn(quad_max(greatest), scale_log2));
    const float offset = combine.top == -INFINITY ? 0.0f : combine.top;
    float own = 0.0f;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s.x[0][n][2 * h + e];
        x = exp2_approx(fmaf(x, scale_log2, -offset));
        own += x;
      }
    top[h] = combine.top;
    sum[h] = __fmaf_rn(sum[h], combine.keep, own);
    keep[h] = combine.keep;
  }
}

template <int OT>
__device__ __forceinline__ void rescale(Accumulator<1, OT>& out, const float (&keep)[2]) {
  // Skipped if all factors are 1: multiplying would not change a bit.
  if (!__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < OT; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) out.x[0][n][e] *= keep[e / 2];
}

}  // namespace flash_dist

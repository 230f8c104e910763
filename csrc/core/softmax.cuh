// Online softmax: the scores come block by block.
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
  float row_sum[MT][2];  // over this lane's columns; quad_sum() adds those of the other lanes

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

// The factor of O and the sums when a maximum grows. The offset, maximum * scale_log2, is rounded: with
// scores in the hundreds the error is 2^-16 of P, in the same direction for a whole row until the next
// maximum. ROUNDED takes the factor between the rounded offsets that P had; EXACT takes it between the
// maxima themselves, which is enough for a P with fewer digits.
enum class Offsets { EXACT, ROUNDED };

template <Offsets OFFSETS>
__device__ __forceinline__ float change_of(float row_max, float scale_log2, float offset) {
  if constexpr (OFFSETS == Offsets::EXACT) return fmaf(row_max, scale_log2, -offset);
  return __fsub_rn(__fmul_rn(row_max, scale_log2), offset);
}

// The greatest of `top` and the scores of row h of row tile m.
template <int MT, int NT>
__device__ __forceinline__ float find_top(const Accumulator<MT, NT>& s, float top, int m, int h) {
#pragma unroll
  for (int n = 0; n < NT; ++n) top = fmaxf(top, fmaxf(s.x[m][n][2 * h], s.x[m][n][2 * h + 1]));
  return quad_max(top);
}

// S -> P = exp2(S * scale_log2 - row_max). Rescales the sums. Returns whether a maximum has grown: the
// caller then rescales O. The factor of a row whose maximum stays is exactly 1. top_of(m, h): the new
// maximum of a row.
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
      // NOTE: a row without a visible key so far keeps -inf; 0 instead avoids inf - inf.
      const float offset = top == -INFINITY ? 0.0f : top * scale_log2;
      // NOTE: not left to the fma, which would not give 1: the offset is rounded, its product is not.
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

// Makes P and rescales O. top_of: as of to_probabilities().
template <Offsets OFFSETS = Offsets::EXACT, int MT, int NT, int OT, class TopOf>
__device__ __forceinline__ void online_softmax(Accumulator<MT, NT>& s, Accumulator<MT, OT>& o,
                                               SoftmaxState<MT>& state, float scale_log2,
                                               TopOf top_of) {
  float rescale[MT][2];
  const bool grown = to_probabilities<OFFSETS>(s, state, rescale, scale_log2, top_of);
  // Multiplying by 1 changes nothing, so the skip does not change a bit.
  if (__any_sync(0xffffffffu, grown)) rescale_rows(o, rescale);
}

// The same for a warp with all scores of its rows.
template <Offsets OFFSETS = Offsets::EXACT, int MT, int NT, int OT>
__device__ __forceinline__ void online_softmax(Accumulator<MT, NT>& s, Accumulator<MT, OT>& o,
                                               SoftmaxState<MT>& state, float scale_log2) {
  online_softmax<OFFSETS>(s, o, state, scale_log2,
                          [&](int m, int h) { return find_top(s, state.row_max[m][h], m, h); });
}

// O / sum, and lse = max * scale + ln(sum), of the warp's rows, of which the first `rows` exist. sink: the
// head's, or null. A row without a visible key gets 0, and lse of -inf or the sink.
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

// Turns scores of latent keys into weights, S -> P = exp2(S * scale - top); each tile is multiplied with
// V, its first columns, before the next is read. top and sum: of the two rows of a lane over the keys so
// far, sum of the columns of the lane alone. keep: the factor that rescales O, and sum here.
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
  // Multiplying by 1 changes nothing, so the skip does not change a bit.
  if (!__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
  for (int n = 0; n < OT; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) out.x[0][n][e] *= keep[e / 2];
}

}  // namespace flash_dist

// The score modification between q . k and the mask, and the sink that is added to a row's sum:
//
//   s = c * tanh(q . k * scale / c) - slope * |i + seqlen_k - seqlen_q - j|        soft cap, ALiBi
//   lse = ln(sum of exp(s) over the keys + exp(sink))                              sink
//
// A kernel tests for a modification once per tile. ScoreParams::scale is the factor of the scores
// in the softmax. It is 1 in calls with a modification, because apply_score_mod() applies
// softmax_scale.
#pragma once

#include "core/accumulator.cuh"
#include "core/params.h"
#include "ptx/convert.cuh"

namespace flash_dist {

// FAST: error 2^-23, on the special-function unit. With a cap up to FAST_CAP this error is smaller
// than the rounding of 16-bit operands. EXACT: for fp32 operands. NONE: for kernels without soft
// caps.
enum class Tanh { FAST, EXACT, NONE };

// The smallest soft cap c for which apply_score_mod_derivative() is accurate to 2^-20 / c without
// the exact logarithm. For smaller caps the fp32 kernels recompute the scores.
constexpr float PRECISE_CAP = 1.0f;

template <Tanh TANH>
__device__ __forceinline__ float tanh_of(float x) {
  if constexpr (TANH == Tanh::EXACT) return tanhf(x);
  return fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(2.0f * LOG2_E * x)), 1.0f);
}

__device__ __forceinline__ float tanh_far(float x) {
  return copysignf(tanh_of<Tanh::FAST>(fabsf(x)), x);
}
// tanh(x) with a relative error of 2^-21. For |x| up to 0.5 it is x P(x^2), where P is a minimax
// fit with a relative error of 1.3e-8. For larger |x| the FAST formula is accurate enough, because
// tanh is not small there.
__device__ __forceinline__ float tanh_near(float x) {
  constexpr float TERMS[] = {9.999999866e-01f, -3.333306541e-01f, 1.332470049e-01f,
                             -5.298106528e-02f, 1.712503569e-02f};
  const float square = x * x, far = tanh_far(x);
  float sum = TERMS[4];
#pragma unroll
  for (int i = 3; i >= 0; --i) sum = fmaf(sum, square, TERMS[i]);
  return fabsf(x) <= 0.5f ? x * sum : far;
}

// Returns the ALiBi slope of a query head, or 0 without ALiBi.
__device__ __forceinline__ float alibi_slope(const ScoreParams& p, int batch, int head) {
  return p.alibi == nullptr ? 0.0f : p.alibi[batch * p.alibi_batch + head];
}

// Position of a warp's tile of scores. row0: its first query + seqlen_k - seqlen_q. key0: its first
// key. slope: the ALiBi slope of the query head.
struct ScorePlace {
  float slope;
  int row0, key0;

  // distance(): i + seqlen_k - seqlen_q - j of the first score of a lane's fragments. step(): the
  // number to add to distance() for the score at (m, n, i). TRANSPOSED: the fragments have the keys
  // along their rows.
  template <bool TRANSPOSED>
  __device__ __forceinline__ float distance() const {
    const int lane = threadIdx.x % 32;
    const int down = lane / 4, right = lane % 4 * 2;
    return static_cast<float>(row0 - key0 + (TRANSPOSED ? right - down : down - right));
  }
  template <bool TRANSPOSED>
  __device__ __forceinline__ static float step(int m, int n, int i) {
    const int down = m * 16 + i / 2 * 8, right = n * 8 + i % 2;
    return static_cast<float>(TRANSPOSED ? right - down : down - right);
  }
};

// Replaces the products q . k in s with scores. With a soft cap, calls derivative(m, n, i, x) for
// each score, where x = ds / d(q . k * scale).
template <Tanh TANH, bool TRANSPOSED, int MT, int NT, class Derivative>
__device__ __forceinline__ void apply_score_mod(Accumulator<MT, NT>& s, const ScoreParams& p,
                                                const ScorePlace& at, Derivative derivative) {
  if (TANH == Tanh::NONE || p.softcap == 0.0f) {
    s.scale(p.scale_inside);
  } else {
    const auto cap = [&](auto tanh) {
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float t = tanh(s.x[m][n][i] * p.scale_inside);
            derivative(m, n, i, fmaf(-t, t, 1.0f));
            s.x[m][n][i] = p.softcap * t;
          }
    };
    if (TANH == Tanh::FAST && p.softcap > FAST_CAP) {
      cap([](float x) { return tanh_near(x); });
    } else {
      cap([](float x) { return tanh_of<TANH>(x); });
    }
  }
  if (at.slope == 0.0f) return;
  const float first = at.distance<TRANSPOSED>();
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float distance = fabsf(first + ScorePlace::step<TRANSPOSED>(m, n, i));
        s.x[m][n][i] = fmaf(-at.slope, distance, s.x[m][n][i]);
      }
}

template <Tanh TANH, bool TRANSPOSED = false, int MT, int NT>
__device__ __forceinline__ void apply_score_mod(Accumulator<MT, NT>& s, const ScoreParams& p,
                                                const ScorePlace& at) {
  apply_score_mod<TANH, TRANSPOSED>(s, p, at, [](int, int, int, float) {});
}

// Replaces the products q . k in s with scores. Also changes dP so that P * (dP - delta) is the
// gradient with respect to q . k * scale. For the dQ kernels, which have S and dP at the same time.
template <Tanh TANH, int MT, int NT>
__device__ __forceinline__ void apply_score_mod_to_both(Accumulator<MT, NT>& s,
                                                        Accumulator<MT, NT>& dp,
                                                        const float (&delta)[MT][2],
                                                        const ScoreParams& p,
                                                        const ScorePlace& at) {
  apply_score_mod<TANH, false>(s, p, at, [&](int m, int n, int i, float derivative) {
    float& x = dp.x[m][n][i];
    x = fmaf(x - delta[m][i / 2], derivative, delta[m][i / 2]);
  });
}

// Multiplies x by the derivative ds / d(q . k * scale) under a soft cap. x is dS^T, or the P^T from
// which dS^T is computed. Recovers the scores from P^T: s = ln P + lse. lse_log2(n): lse of query
// n * 8 + lane % 4 * 2 and of the next query.
template <int MT, int NT, class Lse>
__device__ __forceinline__ void apply_score_mod_derivative(Accumulator<MT, NT>& x,
                                                           const Accumulator<MT, NT>& pt,
                                                           const ScoreParams& p,
                                                           const ScorePlace& at, Lse lse_log2) {
  const float first = at.distance<true>();
  const auto each = [&](auto log2_of) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 lse = lse_log2(n);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = pt.x[m][n][i];
          const float s = (log2_of(weight) + (i % 2 == 0 ? lse.x : lse.y)) * LN_2;
          const float distance = fabsf(first + ScorePlace::step<true>(m, n, i));
          const float t = fmaf(at.slope, distance, s) * p.per_cap;
          // NOTE: P = 0 would give s = -inf. x is already 0 there.
          if (weight > 0.0f) x.x[m][n][i] *= fmaf(-t, t, 1.0f);
        }
    }
  };
  if (p.softcap < PRECISE_CAP) {
    each([](float weight) { return log2f(weight); });
  } else {
    each([](float weight) { return log2_approx(weight); });
  }
}

// Adds the sink to a row's sum of exponentials: updates lse, and `inverse`, the factor of O.
__device__ __forceinline__ void join_sink(float sink, float& lse, float& inverse) {
  const float top = fmaxf(lse, sink);
  if (top == -INFINITY) return;
  if (sink == INFINITY) {  // a sink of +inf takes all weight
    lse = INFINITY;
    inverse = 0.0f;
    return;
  }
  // NOTE: explicit rounding keeps the compiler from contracting operations to fma, so that all
  // kernels get the same bits.
  const float keys = expf(__fsub_rn(lse, top));
  const float sum = __fadd_rn(keys, expf(__fsub_rn(sink, top)));
  lse = __fadd_rn(top, logf(sum));
  inverse = __fmul_rn(inverse, __fdiv_rn(keys, sum));
}

}  // namespace flash_dist

// The score modification of core/scores.cuh in the Hopper kernels: in base 2, with factors
// precomputed on the host. With a soft cap c, and c' = c log2 e:
//
//   r = 1 / (1 + e^2x), x = q . k * scale / c        tanh(x) = 1 - 2 r
//   s log2 e = c' - 2 c' r - slope' * |distance|     ds / dx = c (1 - tanh(x)^2)
//
// Without a cap: s log2 e = q . k * scale' - slope' * |distance|. A kernel tests for the cap once
// per tile. In the backward, the slope is 0 under a cap without ALiBi. Such a step waits for the
// special-function unit, so the unused ALiBi term costs nothing.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/scores.cuh"
#include "ptx/copy.cuh"
#include "ptx/elements.h"
#include "ptx/registers.cuh"

namespace flash_dist {

struct ScoreModParams {
  float inside;       // factor of q . k: scale', or 2 log2(e) scale / c under a cap
  float cap;          // c'; 0: none
  float minus_2_cap;  // -2 c'
};

template <class Params>  // FwdParams or BwdParams, scores filled in
ScoreModParams make_score_mod(const Params& p) {
  const float cap = p.scores.softcap * LOG2_E;
  const float inside = p.scores.scale_inside * LOG2_E;
  return {cap == 0.0f ? inside : 2.0f * inside, cap, -2.0f * cap};
}

// q . k -> r.
__device__ __forceinline__ float capping(float x, const ScoreModParams& p) {
  return reciprocal_approx(1.0f + exp2_approx(x * p.inside));
}

// 1 - tanh(x)^2 from r; 0 if r is infinite.
__device__ __forceinline__ float softcap_derivative(float r) {
  const float t = fmaf(-2.0f, r, 1.0f);
  return fma_saturated(-t, t, 1.0f);
}

// ALiBi's bias times log2 e, for a lane's fragment of 16 rows. TRANSPOSED: the rows are keys.
template <bool TRANSPOSED>
struct AlibiBias {
  float minus_slope;
  float first;  // i + seqlen_k - seqlen_q - j of this lane's first score

  // row0: the warp's first query, counted from the bottom right. key0: its first key.
  __device__ __forceinline__ AlibiBias(float minus_slope_, int row0, int key0)
      : minus_slope(minus_slope_) {
    const int lane = fresh_thread() % 32;
    const int down = lane / 4, right = lane % 4 * 2;
    first = static_cast<float>(row0 - key0 + (TRANSPOSED ? right - down : down - right));
  }
  // The bias of score (n, i) of the fragment.
  __device__ __forceinline__ float operator()(int n, int i) const {
    return minus_slope * fabsf(first + ScorePlace::step<TRANSPOSED>(0, n, i));
  }
};

// The factor of |distance| for a query head.
__device__ __forceinline__ float minus_alibi_slope(const ScoreParams& p, int batch, int head) {
  return -LOG2_E * alibi_slope(p, batch, head);
}

// The score modification of the forward.
struct FwdScoreModParams : ScoreModParams {
  float top;  // subtracted from scores instead of the row maximum; 0: use the row maximum
};

// Under a cap c every score is in [-c', c']. bf16 has the exponent range of fp32. So rows need no
// maximum of their own if 2^(2 c') stays in that range. With `top` subtracted, P is at least
// 2^-100, and at most 1 or, for a cap above 34, 2^(2 c' - 100). Values up to 2^60 then do not
// overflow.
constexpr float BOUNDED_CAP = 50.0f;

template <class T, class Params>
FwdScoreModParams make_fwd_score_mod(const Params& p) {
  const ScoreModParams base = make_score_mod(p);
  const bool bounded = std::is_same_v<T, Bf16> && p.scores.softcap != 0.0f &&
                       p.scores.softcap <= BOUNDED_CAP && p.scores.alibi == nullptr;
  return {base, bounded ? std::fmin(base.cap, 100.0f - base.cap) : 0.0f};
}

// r of four scores of a row, from one reciprocal of the product of their denominators. Denominators
// are clamped to 2^30: an r below 2^-30 does not matter.
__device__ __forceinline__ void capping4(float (&x)[4], const ScoreModParams& p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = 1.0f + exp2_approx(min_nan(x[i] * p.inside, 30.0f));
  const float left = x[0] * x[1], right = x[2] * x[3];
  const float all = reciprocal_approx(left * right);
  const float of_left = all * right, of_right = all * left;
  const float first = of_left * x[1], third = of_right * x[3];
  x[1] = of_left * x[0];
  x[3] = of_right * x[2];
  x[0] = first;
  x[2] = third;
}

// q . k -> s log2 e - top, under a cap.
template <int NT>
__device__ __forceinline__ void apply_softcap(Accumulator<1, NT>& s, const FwdScoreModParams& p) {
  const float offset = p.cap - p.top;
#pragma unroll
  for (int n = 0; n < NT; n += 2)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float r[4] = {s.x[0][n][2 * h], s.x[0][n][2 * h + 1], s.x[0][n + 1][2 * h],
                    s.x[0][n + 1][2 * h + 1]};
      capping4(r, p);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s.x[0][n + i / 2][2 * h + i % 2] = fmaf(p.minus_2_cap, r[i], offset);
    }
}

// Adds ALiBi to s log2 e of 16 queries from row0 on, counted from the bottom right. key(n): first
// key of columns 8 * n on; 64 columns have contiguous keys. Multiplies s by `scale` first.
template <int NT, class Key>
__device__ __forceinline__ void apply_alibi(Accumulator<1, NT>& s, float scale, float minus_slope,
                                            int row0, Key key) {
  constexpr int TOGETHER = 64 / 8;
#pragma unroll
  for (int n0 = 0; n0 < NT; n0 += TOGETHER) {
    const AlibiBias<false> alibi(minus_slope, row0, key(n0));
#pragma unroll
    for (int n = n0; n < NT && n < n0 + TOGETHER; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s.x[0][n][i] = fmaf(s.x[0][n][i], scale, alibi(n - n0, i));
      }
  }
}

// q . k -> s log2 e - top.
template <int NT, class Key>
__device__ __forceinline__ void apply_score_mod(Accumulator<1, NT>& s, const FwdScoreModParams& p,
                                                bool has_alibi, float minus_slope, int row0,
                                                Key key) {
  if (p.minus_2_cap != 0.0f) apply_softcap(s, p);
  if (has_alibi) apply_alibi(s, p.minus_2_cap == 0.0f ? p.inside : 1.0f, minus_slope, row0, key);
}

// Under a cap, q . k -> r, for weigh(). Masked scores must then be masked_score().
template <int NT>
__device__ __forceinline__ void begin_softcap(Accumulator<1, NT>& x, const ScoreModParams& p) {
  if (p.cap == 0.0f) return;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x.x[0][n][i] = capping(x.x[0][n][i], p);
}
// The score of a masked key: q . k = -inf, or r = +inf under a cap.
__device__ __forceinline__ float masked_score(const ScoreModParams& p) {
  return p.cap == 0.0f ? -INFINITY : INFINITY;
}

// Computes P^T and P^T * (1 - tanh^2), from which dS^T is made, both times 2^SHIFT. x: scores with
// keys along the rows, after begin_softcap(). keep(k, weight, product) receives both for 16
// queries, once their scores are no longer needed. lse: address of the first query's lse, in base
// 2.
template <int SHIFT, int NT, class Keep>
__device__ __forceinline__ void weigh(const Accumulator<1, NT>& x, uint32_t lse,
                                      const ScoreModParams& p, const AlibiBias<true>& alibi,
                                      Keep keep) {
  const uint32_t own = lse + fresh_thread() % 4 * 8;
  const auto each = [&](auto exponent, auto slope) {
#pragma unroll
    for (int k = 0; k < NT / 2; ++k) {
      Accumulator<1, 2> weight, product;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 lses = load_shared_8(own + (2 * k + n) * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float one = x.x[0][2 * k + n][i];
          const float minus = SHIFT - (i % 2 == 0 ? lses.x : lses.y);
          weight.x[0][n][i] = exp2_approx(exponent(one, minus) + alibi(2 * k + n, i));
          product.x[0][n][i] = slope(weight.x[0][n][i], one);
        }
      }
      keep(k, weight, product);
    }
  };
  if (p.cap == 0.0f) {
    each([&](float score, float minus) { return fmaf(score, p.inside, minus); },
         [](float weight, float) { return weight; });
  } else {
    each([&](float r, float minus) { return fmaf(p.minus_2_cap, r, p.cap + minus); },
         [](float weight, float r) { return weight * softcap_derivative(r); });
  }
}

}  // namespace flash_dist

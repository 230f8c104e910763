// What becomes of a score between q . k and the mask in Hopper's kernels of scored calls: what
// core/scores.cuh says, in base 2, with what the host has multiplied out. Of a cap c with c' = c log2 e
//
//   r = 1 / (1 + e^2x), x = q . k * scale / c        tanh(x) = 1 - 2 r
//   s log2 e = c' - 2 c' r - slope' * |distance|     ds / dx = c (1 - tanh(x)^2)
//
// and without one s log2 e = q . k * scale' - slope' * |distance|. Which it is, is looked at once per
// tile. With a cap the slope is 0 where there is no ALiBi: such a step waits for the special-function
// unit, beside which its term costs nothing.
#pragma once

#include <cmath>

#include "core/scores.cuh"
#include "ptx/copy.cuh"
#include "ptx/special.cuh"

namespace flash_dist {

struct BendParams {
  float inside;       // by which q . k is multiplied: scale', or 2 log2(e) scale / c under a cap
  float cap;          // c', 0: none
  float minus_2_cap;  // -2 c'
};

template <class Params>  // FwdParams or BwdParams, their scores filled in
BendParams make_bend(const Params& p) {
  const float cap = p.scores.softcap * LOG2_E;
  const float inside = p.scores.scale_inside * LOG2_E;
  return {cap == 0.0f ? inside : 2.0f * inside, cap, -2.0f * cap};
}

// r of q . k.
__device__ __forceinline__ float capping(float x, const BendParams& p) {
  return reciprocal_approx(1.0f + exp2_approx(x * p.inside));
}

// 1 - tanh(x)^2 of r; 0 where r is infinite.
__device__ __forceinline__ float cap_slope(float r) {
  const float t = fmaf(-2.0f, r, 1.0f);
  return fma_saturated(-t, t, 1.0f);
}

// ALiBi's part, times log2 e, of a lane's fragment of 16 rows. TRANSPOSED: keys are the rows.
template <bool TRANSPOSED>
struct Ramp {
  float minus_slope;
  float first;  // i + seqlen_k - seqlen_q - j, of the fragment's first score of this lane

  // Of the warp's first query, counted at the bottom right, and its first key.
  __device__ __forceinline__ Ramp(float minus_slope_, int row0, int key0)
      : minus_slope(minus_slope_) {
    const int lane = fresh_thread() % 32;
    const int down = lane / 4, right = lane % 4 * 2;
    first = static_cast<float>(row0 - key0 + (TRANSPOSED ? right - down : down - right));
  }
  // Of score (n, i) of the fragment.
  __device__ __forceinline__ float operator()(int n, int i) const {
    return minus_slope * fabsf(first + ScorePlace::step<TRANSPOSED>(0, n, i));
  }
};

// By what distances are multiplied, of a query head.
__device__ __forceinline__ float ramp_slope(const ScoreParams& p, int batch, int head) {
  return -LOG2_E * alibi_slope(p, batch, head);
}

// q . k -> s log2 e, of 16 queries from row0 on, counted at the bottom right. key(n): the first key of
// columns 8 * n on, of 64 at a time, which lie together.
template <int NT, class Key>
__device__ __forceinline__ void bend(Accumulator<1, NT>& s, const BendParams& p, float minus_slope,
                                     int row0, Key key) {
  constexpr int TOGETHER = 64 / 8;
  const auto each = [&](auto bent) {
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += TOGETHER) {
      const Ramp<false> ramp(minus_slope, row0, key(n0));
#pragma unroll
      for (int n = n0; n < NT && n < n0 + TOGETHER; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s.x[0][n][i] = bent(s.x[0][n][i], ramp(n - n0, i));
    }
  };
  if (p.cap == 0.0f) {
    each([&](float x, float ramp) { return fmaf(x, p.inside, ramp); });
  } else {
    each([&](float x, float ramp) { return fmaf(p.minus_2_cap, capping(x, p), p.cap) + ramp; });
  }
}

// For weigh(): a capped call's q . k -> r. A hidden score is then hidden_score().
template <int NT>
__device__ __forceinline__ void begin_cap(Accumulator<1, NT>& x, const BendParams& p) {
  if (p.cap == 0.0f) return;
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) x.x[0][n][i] = capping(x.x[0][n][i], p);
}
// What has no weight: q . k of -inf, r of +inf.
__device__ __forceinline__ float hidden_score(const BendParams& p) {
  return p.cap == 0.0f ? -INFINITY : INFINITY;
}

// Of scores with the keys along their rows, which begin_cap() has seen: P^T, and P^T * (1 - tanh^2) of
// which dS^T is made, both 2^SHIFT times as large. keep(k, weight, product) is called with 16 queries of
// each, when their scores are no longer wanted. lse: address of the first query's, in base 2.
template <int SHIFT, int NT, class Keep>
__device__ __forceinline__ void weigh(const Accumulator<1, NT>& x, uint32_t lse,
                                      const BendParams& p, const Ramp<true>& ramp, Keep keep) {
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
          weight.x[0][n][i] = exp2_approx(exponent(one, minus) + ramp(2 * k + n, i));
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
         [](float weight, float r) { return weight * cap_slope(r); });
  }
}

}  // namespace flash_dist

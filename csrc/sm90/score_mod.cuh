// The score modification of core/scores.cuh in the Hopper kernels: in base 2, with factors
// precomputed on the host. A prime marks a factor times log2 e. With a soft cap c,
// x = q . k * scale / c and t = tanh(x):
//
//   s log2 e = c' t - slope' * |distance|            ds / dx = c (1 - t^2)
//
// Without a cap: s log2 e = q . k * scale' - slope' * |distance|. A kernel tests for the cap once
// per tile. Most scores are far below the cap, where a polynomial of q . k gives t. This relieves
// the special-function unit, which computes the weights and limits these kernels. A score's own
// size selects its formula, so its bits do not depend on other scores.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/scores.cuh"
#include "ptx/copy.cuh"
#include "ptx/elements.h"
#include "ptx/registers.cuh"

namespace flash_dist {

// Approximates factor * tanh(score * inside), for |score * inside| <= LIMIT, by score * P(score^2).
// factor() returns P(score^2). P is a minimax fit with a relative error of 1e-7. The product in
// fp32 has a relative error of 2^-22.
struct NearTanh {
  static constexpr float LIMIT = 0.4f;
  float terms[4];  // the coefficients of P, lowest power first

  static NearTanh of(double factor, double inside) {
    const double square = inside * inside;
    NearTanh result;
    double power = factor * inside;
    int i = 0;
    for (double fit :
         {0.9999999019009347, -0.3333136245895364, 0.13270976759076633, -0.04755360362922874}) {
      result.terms[i++] = static_cast<float>(fit * power);
      power *= square;
    }
    return result;
  }
  __device__ __forceinline__ float factor(float score) const {
    const float square = score * score;
    float sum = terms[3];
#pragma unroll
    for (int i = 2; i >= 0; --i) sum = fmaf(sum, square, terms[i]);
    return sum;
  }
};

struct ScoreModParams {
  float inside;   // factor of q . k: scale', or scale / c under a cap
  float cap;      // c'; 0: no soft cap
  NearTanh near;  // approximates t; in the forward, c' t
};

template <class Params>  // FwdParams or BwdParams, whose scores are filled in
ScoreModParams make_score_mod(const Params& p, bool times_cap = false) {
  const float cap = p.scores.softcap * LOG2_E;
  const float inside = p.scores.scale_inside * (cap == 0.0f ? LOG2_E : 1.0f);
  return {inside, cap, NearTanh::of(times_cap ? cap : 1.0, inside)};
}

// Replaces each score of a warp by near(score) if |score * inside| <= NearTanh::LIMIT, else by
// far(score * inside).
template <int NT, class Near, class Far>
__device__ __forceinline__ void replace_scores(Accumulator<1, NT>& s, float inside, Near near,
                                               Far far) {
  float top[4] = {};
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i] = fmaxf(top[i], fabsf(s.x[0][n][i]));
  const float largest = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
  const auto each = [&](auto replace) {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s.x[0][n][i] = replace(s.x[0][n][i]);
  };
  const auto is_far = [&](float score) { return fabsf(score * inside) > NearTanh::LIMIT; };
  if (__any_sync(0xffffffffu, is_far(largest))) {
    each([&](float score) { return is_far(score) ? far(score * inside) : near(score); });
  } else {
    each(near);
  }
}

// ALiBi's bias times log2 e, for a lane's fragment of 16 rows. TRANSPOSED: the rows are keys.
template <bool TRANSPOSED>
struct AlibiBias {
  float minus_slope;
  float first;  // i + seqlen_k - seqlen_q - j of this lane's first score (query i, key j)

  // Makes the bias of a warp's fragment. row0: the fragment's first query plus seqlen_k - seqlen_q.
  // key0: the fragment's first key.
  __device__ __forceinline__ AlibiBias(float minus_slope_, int row0, int key0)
      : minus_slope(minus_slope_) {
    const int lane = fresh_thread() % 32;
    const int down = lane / 4, right = lane % 4 * 2;
    first = static_cast<float>(row0 - key0 + (TRANSPOSED ? right - down : down - right));
  }
  // Returns the bias of score (n, i) of the fragment.
  __device__ __forceinline__ float operator()(int n, int i) const {
    return minus_slope * fabsf(first + ScorePlace::step<TRANSPOSED>(0, n, i));
  }
};

// Returns -slope', the factor of |distance|, for a query head.
__device__ __forceinline__ float minus_alibi_slope(const ScoreParams& p, int batch, int head) {
  return -LOG2_E * alibi_slope(p, batch, head);
}

// The score modification of the forward.
struct FwdScoreModParams : ScoreModParams {
  float top;  // subtracted from scores instead of the row maximum; 0: use the row maximum
};

// The largest soft cap c for which rows in bf16 need no maximum of their own. Every score is in
// [-c', c'], and bf16 has the exponent range of fp32. With `top` subtracted, P is at least 2^-100,
// and at most 1 or, for a cap above 34, 2^(2 c' - 100). Sums of P @ V then do not overflow for
// elements of v up to 2^60.
constexpr float BOUNDED_CAP = 50.0f;

template <class T, class Params>
FwdScoreModParams make_fwd_score_mod(const Params& p) {
  const ScoreModParams base = make_score_mod(p, true);
  const bool bounded = std::is_same_v<T, Bf16> && p.scores.softcap != 0.0f &&
                       p.scores.softcap <= BOUNDED_CAP && p.scores.alibi == nullptr;
  return {base, bounded ? std::fmin(base.cap, 100.0f - base.cap) : 0.0f};
}

// Replaces the products q . k in `s` by c' t - p.top. Only for calls with a cap.
template <int NT>
__device__ __forceinline__ void apply_softcap(Accumulator<1, NT>& s, const FwdScoreModParams& p) {
  replace_scores(
      s, p.inside, [&](float score) { return fmaf(score, p.near.factor(score), -p.top); },
      [&](float x) { return fmaf(p.cap, tanh_far(x), -p.top); });
}

// Multiplies the scores of 16 queries by `scale`, then adds ALiBi's bias times log2 e. row0: the
// first query plus seqlen_k - seqlen_q. key(n): the key of column 8 * n; each 64 columns have
// contiguous keys.
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

// Replaces the products q . k in `s` by scores times log2 e, less p.top.
template <int NT, class Key>
__device__ __forceinline__ void apply_score_mod(Accumulator<1, NT>& s, const FwdScoreModParams& p,
                                                bool has_alibi, float minus_slope, int row0,
                                                Key key) {
  if (p.cap != 0.0f) apply_softcap(s, p);
  if (has_alibi) apply_alibi(s, p.cap == 0.0f ? p.inside : 1.0f, minus_slope, row0, key);
}

// Under a cap, replaces the products q . k in x by t, for weigh().
template <int NT>
__device__ __forceinline__ void begin_softcap(Accumulator<1, NT>& x, const ScoreModParams& p) {
  if (p.cap == 0.0f) return;
  replace_scores(x, p.inside, [&](float score) { return score * p.near.factor(score); }, tanh_far);
}

// Computes weight = 2^SHIFT P^T, and the product from which dS^T is computed: weight * (1 - t^2)
// under a cap, else weight. x: scores with keys along the rows, after begin_softcap(). keep(k,
// weight, product) receives both for the 16 queries from 16 * k on, once their scores are no longer
// needed. lse: address in shared memory of the first query's lse, in base 2.
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
    each([&](float t, float minus) { return fmaf(p.cap, t, minus); },
         [](float weight, float t) { return weight * fma_saturated(-t, t, 1.0f); });  // 0 for -inf
  }
}

}  // namespace flash_dist

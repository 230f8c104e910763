// The bias of the fused backward kernel for Hopper (core/bias.cuh). While S^T is computed, a warp
// reads the biases of its 16 keys and of a stage's 64 queries from global memory. A 16-bit pair in
// memory holds two neighbouring keys; movmatrix turns it into a pair of neighbouring queries.
#pragma once

#include "bwd_bias_plans.h"
#include "ptx/copy.cuh"
#include "ptx/ldmatrix.cuh"
#include "sm90/bias.cuh"
#include "sm90/bwd/launch.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FusedBiasSm90Config
    : FusedSm90ConfigOf<FusedBiasSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN, false, false, true> {};

template <class Config>
const char* refuse_fused_bias_sm90(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  const char* problem = find_problem_beside_bias<Config>(p, p.dout);
  if (problem != nullptr) return problem;
  if (!Config::BIAS_TAKES_ALL && (p.bias.is_fp32 || !p.bias.in_pairs)) {
    return "it reads a bias of 16 bits in pairs alone";
  }
  return nullptr;
}

template <class Config>
struct BwdSm90Bias {
  using T = typename Config::T;
  static constexpr int NT = Config::BLOCK_M / 8;  // tiles of 8 queries
  static constexpr bool TAKES_ALL = Config::BIAS_TAKES_ALL;
  using Fragment =
      uint32_t[(TAKES_ALL ? 4 : 2) * NT];  // 16-bit biases are pairs and fill half of it

  const BwdParams& p;
  const DkdvSm90Work& work;

  // Loads the biases of an item. key0: the warp's first key. Queries beyond the end get the bias of
  // the last one. NOTE: keys beyond the end of a document get any numbers of the bias.
  __device__ __forceinline__ void fetch(Fragment& x, const DkdvItem& item, int key0) const {
    const BiasParams& bias = p.bias;
    const int bytes = bias.is_fp32 ? 4 : 2;
    const uint8_t* head =
        static_cast<const uint8_t*>(bias.data) +
        bytes * (work.batch * bias.batch + (work.head + item.head_in_group) * bias.head);
    if (TAKES_ALL && bias.is_fp32) {
      if constexpr (TAKES_ALL) fetch_fp32(x, head, item.row0, key0);
    } else if (!TAKES_ALL || bias.in_pairs) {
      fetch_pairs(x, head, item.row0, key0,
                  [](const uint8_t* left, const uint8_t*) { return load_constant_4(left); });
    } else {
      fetch_pairs(x, head, item.row0, key0, [](const uint8_t* left, const uint8_t* right) {
        return load_constant_2(left) | load_constant_2(right) << 16;
      });
    }
  }

  // Computes 2^SHIFT P^T from S^T.
  template <int SHIFT, class Scores, class Lse>
  __device__ __forceinline__ void exponentiate(Scores& pt, const Lse& lse,
                                               const Fragment& x) const {
    if (TAKES_ALL && p.bias.is_fp32) {
      exponentiate<SHIFT>(pt, lse, [&](int i) -> float2 {
        if constexpr (!TAKES_ALL) return {};
        return {bias_of_fp32(x[2 * i]), bias_of_fp32(x[2 * i + 1])};
      });
    } else {
      exponentiate<SHIFT>(pt, lse, [&](int i) { return bias_of_pair<T>(movmatrix_trans(x[i])); });
    }
  }

 private:
  template <int SHIFT, class Scores, class Lse, class Numbers>
  __device__ __forceinline__ void exponentiate(Scores& pt, const Lse& lse, Numbers numbers) const {
    const float scale_log2 = p.softmax_scale * LOG2_E;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 lses = lse[n];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 both = numbers(2 * n + h);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& one = pt.x[0][n][2 * h + e];
          const float minus = SHIFT - (e == 0 ? lses.x : lses.y);
          one = exp2_approx(fmaf(one, scale_log2, fmaf(e == 0 ? both.x : both.y, LOG2_E, minus)));
        }
      }
    }
  }

  __device__ __forceinline__ int query(int i) const { return min(i, work.seqlen_q - 1); }
  __device__ __forceinline__ int key(int i, int last = 1) const {
    return min(i, p.seqlen_k - last);
  }

  // Loads the pairs. Register 2 * n + h holds query lane / 4 of 8, and keys 2 * (lane % 4) and 2 *
  // (lane % 4) + 1 of 8.
  template <class Load>
  __device__ __forceinline__ void fetch_pairs(Fragment& x, const uint8_t* head, int row0, int key0,
                                              Load load) const {
    const int lane = fresh_thread() % 32;
    int64_t left[2], right[2];  // in bytes
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = key(key0 + 8 * h + lane % 4 * 2, p.bias.in_pairs ? 2 : 1);
      left[h] = 2 * (first * p.bias.key);
      right[h] = 2 * (key(first + 1) * p.bias.key);
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint8_t* row = head + 2 * (query(row0 + 8 * n + lane / 4) * p.bias.row);
#pragma unroll
      for (int h = 0; h < 2; ++h) x[2 * n + h] = load(row + left[h], row + right[h]);
    }
  }

  // Loads fp32 biases. Register (2 * n + h) * 2 + e holds query 2 * (lane % 4) + e of 8 and key
  // lane / 4 of 8.
  __device__ __forceinline__ void fetch_fp32(Fragment& x, const uint8_t* head, int row0,
                                             int key0) const {
    const int lane = fresh_thread() % 32;
    const int64_t column[2] = {4 * (key(key0 + lane / 4) * p.bias.key),
                               4 * (key(key0 + 8 + lane / 4) * p.bias.key)};
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint8_t* row = head + 4 * (query(row0 + 8 * n + lane % 4 * 2 + e) * p.bias.row);
#pragma unroll
        for (int h = 0; h < 2; ++h) x[(2 * n + h) * 2 + e] = load_constant_4(row + column[h]);
      }
  }
};

}  // namespace flash_dist

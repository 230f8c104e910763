// The two ways in which the fused backward kernel for Hopper reads a bias (core/bias.cuh).
//
// BwdSm90BiasTile: the loading thread copies boxes to a stage of dS^T by TMA. A warpgroup gets 64
// queries x 64 keys in 16 bits, or twice 64 queries x 32 keys in fp32. A warp reads the biases of
// its 16 keys transposed. Later its warpgroup stores dS^T in the same memory. With fp32 there are
// half as many stages, each of twice the size.
//
// BwdSm90BiasElements: for biases that no tensor map describes. While S^T is computed, a warp reads
// the biases of its 16 keys and a stage's 64 queries from global memory. A 16-bit pair in memory
// holds two adjacent keys; movmatrix turns it into a pair of adjacent queries. On an H200, fetching
// such a bias into L2 ahead of time, by row or by line, made calls slower.
#pragma once

#include "bwd_bias_plans.h"
#include "ptx/copy.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/bias.cuh"
#include "sm90/bwd/launch.h"
#include "sm90/bwd_fused/config.h"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FusedBiasTileSm90Config
    : FusedSm90ConfigOf<FusedBiasTileSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN, false, false, BiasLoads::BOXES> {};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FusedFp32BiasTileSm90Config
    : FusedSm90ConfigOf<FusedFp32BiasTileSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN, false, false, BiasLoads::FP32_BOXES> {};

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct FusedBiasSm90Config
    : FusedSm90ConfigOf<FusedBiasSm90Plan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM,
                        HEAD_DIM_V, PLAN, false, false, BiasLoads::ELEMENTS> {};

template <class Config>
const char* refuse_fused_bias_sm90(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  const char* problem = find_problem_beside_bias<Config>(p, p.dout);
  if (problem != nullptr) return problem;
  if constexpr (Config::BIAS_IN_BOXES) {
    if (static_cast<bool>(p.bias.is_fp32) != Config::BIAS_IS_FP32) {
      return Config::BIAS_IS_FP32 ? "it reads a bias of float32 alone"
                                  : "it reads a bias of 16 bits alone";
    }
    return find_bias_map_problem(p);
  }
  if (!Config::BIAS_TAKES_ALL && (p.bias.is_fp32 || !p.bias.in_pairs)) {
    return "it reads a bias of 16 bits in pairs alone";
  }
  return nullptr;
}

// Returns the L2 priority of a bias. If no queries, heads or batch entries share its elements, each
// is read once, and should not evict queries or sums of dQ.
template <class Params>
__device__ __forceinline__ Caching caching_of_bias(const Params& params) {
  const BwdParams& p = params.p;
  const bool shared = params.bias_rows == 1 ||
                      (params.bias_axes.head_kv == 0 && p.num_heads_kv * p.group > 1) ||
                      (params.bias_axes.batch == 0 && p.batch > 1);
  return shared ? Caching::NORMAL : Caching::EVICT_FIRST;
}

// Computes 2^SHIFT P^T from S^T. numbers(i) returns the biases of pair i of queries; it is called
// with ascending i.
template <class Config, int SHIFT, class Scores, class Lse, class Numbers>
__device__ __forceinline__ void exponentiate_with_bias(Scores& pt, const BwdParams& p,
                                                       const Lse& lse, Numbers numbers) {
  const float scale_log2 = p.softmax_scale * LOG2_E;
#pragma unroll
  for (int n = 0; n < Config::BLOCK_M / 8; ++n) {
    const float2 lses = lse[n];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 both = numbers(2 * n + h);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& one = pt.x[0][n][2 * h + e];
        const float own = e == 0 ? lses.x : lses.y;
        const float minus = SHIFT == 0 ? -own : SHIFT - own;
        one = exp2_approx(fmaf(one, scale_log2, fmaf(e == 0 ? both.x : both.y, LOG2_E, minus)));
      }
    }
  }
}

// The bias of a warpgroup's 64 keys and of a stage's queries, in shared memory. In fp32: two panels
// of 32 keys.
template <class Config>
struct BwdSm90BiasTile {
  using Tile = typename Config::BiasTile;

  const typename Config::Params& params;
  uint32_t tile;

  // Computes 2^SHIFT P^T from S^T. Reads two tiles of 8 queries and 16 keys at a time; in fp32, 8
  // keys of 4 queries.
  template <int SHIFT, class Scores, class Lse>
  __device__ __forceinline__ void exponentiate(Scores& pt, const Lse& lse) const {
    const int lane = fresh_thread() % 32;
    if constexpr (Config::BIAS_IS_FP32) {
      const int warp = warp_of_consumer();
      const bool same = shares_row();
      const int row = same ? 0 : lane % 4 * 2;
      const uint32_t even = tile + warp / 2 * Config::DS_BYTES +
                            Tile::offset(row, warp % 2 * 4 + lane / 16) + lane / 4 % 4 * 4;
      const uint32_t odd = same ? even : (even ^ 16) + Tile::ROW_BYTES;
      const uint32_t step = same ? 0 : 8 * Tile::ROW_BYTES;
      exponentiate_with_bias<Config, SHIFT>(pt, params.p, lse, [&](int i) -> float2 {
        const uint32_t to = i / 2 * step, keys = i % 2 * 32;
        return {bias_of_fp32(load_shared_4((even ^ keys) + to)),
                bias_of_fp32(load_shared_4((odd ^ keys) + to))};
      });
    } else {
      const bool same = shares_row();
      const int row = same ? 0 : lane / 16 * 8 + lane % 8;
      const uint32_t own = tile + Tile::offset(row, warp_of_consumer() * 2 + lane / 8 % 2);
      const uint32_t step = same ? 0 : 16 * Tile::ROW_BYTES;
      uint32_t four[4];
      exponentiate_with_bias<Config, SHIFT>(pt, params.p, lse, [&](int i) {
        if (i % 4 == 0) ldmatrix_x4_trans(four, own + i / 4 * step);
        return bias_of_pair<typename Config::T>(four[i % 4]);
      });
    }
  }

 private:
  // Returns whether all queries have the bias of the first row.
  __device__ __forceinline__ bool shares_row() const { return params.bias_rows == 1; }
};

template <class Config>
struct BwdSm90BiasElements {
  using T = typename Config::T;
  static constexpr int NT = Config::BLOCK_M / 8;  // tiles of 8 queries
  static constexpr bool TAKES_ALL = Config::BIAS_TAKES_ALL;
  using Fragment =
      uint32_t[(TAKES_ALL ? 4 : 2) * NT];  // with TAKES_ALL, 16-bit pairs fill half of the array

  const BwdParams& p;
  const DkdvSm90Work& work;

  // Loads the biases of an item. key0: the warp's first key. Queries beyond the end get the bias of
  // the last query. NOTE: keys beyond the end of a document get arbitrary elements of the bias.
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
      exponentiate_with_bias<Config, SHIFT>(pt, p, lse, [&](int i) -> float2 {
        if constexpr (!TAKES_ALL) return {};
        return {bias_of_fp32(x[2 * i]), bias_of_fp32(x[2 * i + 1])};
      });
    } else {
      exponentiate_with_bias<Config, SHIFT>(
          pt, p, lse, [&](int i) { return bias_of_pair<T>(movmatrix_trans(x[i])); });
    }
  }

 private:
  __device__ __forceinline__ int query(int i) const { return min(i, work.seqlen_q - 1); }
  __device__ __forceinline__ int key(int i, int last = 1) const {
    return min(i, p.seqlen_k - last);
  }

  // Loads 16-bit biases in pairs. Register 2 * n + h belongs to queries 8 * n to 8 * n + 7 and keys
  // 8 * h to 8 * h + 7. Of these it holds query lane / 4 and the two keys from 2 * (lane % 4) on.
  template <class Load>
  __device__ __forceinline__ void fetch_pairs(Fragment& x, const uint8_t* head, int row0, int key0,
                                              Load load) const {
    const int lane = fresh_thread() % 32;
    int64_t left[2], right[2];  // offsets of the two keys, in bytes
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

  // Loads fp32 biases. Register (2 * n + h) * 2 + e belongs to queries 8 * n to 8 * n + 7 and keys
  // 8 * h to 8 * h + 7. Of these it holds query 2 * (lane % 4) + e and key lane / 4.
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

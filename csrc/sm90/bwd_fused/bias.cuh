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
  if (!Config::BIAS_TAKES_FP32 && p.bias.is_fp32) return "it reads a bias of 16 bits alone";
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
  static constexpr bool TAKES_FP32 = Config::BIAS_TAKES_FP32;
  using Fragment = uint32_t[(TAKES_FP32 ? 4 : 2) * NT];  // 16-bit pairs fill 2 * NT

  const BwdParams& p;
  const DkdvSm90Work& work;

  // Loads the biases of an item. key0: the warp's first key. NOTE: queries and keys beyond the end
  // of a document get arbitrary elements of the bias.
  __device__ __forceinline__ void fetch(Fragment& x, const DkdvItem& item, int key0) const {
    const BiasParams& bias = p.bias;
    const int bytes = bias.is_fp32 ? 4 : 2;
    const uint8_t* head =
        static_cast<const uint8_t*>(bias.data) +
        bytes * (work.batch * bias.batch + (work.head + item.head_in_group) * bias.head);
    if (TAKES_FP32 && bias.is_fp32) {
      if constexpr (TAKES_FP32) fetch_fp32(x, head, item.row0, key0);
    } else if (TAKES_FP32 && bias.in_pairs && key0 + KEYS <= p.seqlen_k) {
      fetch_pairs(x, head + 2 * key0, item.row0);
    } else if (bias.key == 1 && key0 + KEYS < p.seqlen_k) {
      fetch_rows(x, head + 2 * key0, item.row0);
    } else {
      fetch_elements(x, head, item.row0, key0);
    }
  }

  // Computes 2^SHIFT P^T from S^T.
  template <int SHIFT, class Scores, class Lse>
  __device__ __forceinline__ void exponentiate(Scores& pt, const Lse& lse,
                                               const Fragment& x) const {
    if (TAKES_FP32 && p.bias.is_fp32) {
      exponentiate_with_bias<Config, SHIFT>(pt, p, lse, [&](int i) -> float2 {
        if constexpr (!TAKES_FP32) return {};
        return {bias_of_fp32(x[2 * i]), bias_of_fp32(x[2 * i + 1])};
      });
    } else {
      exponentiate_with_bias<Config, SHIFT>(
          pt, p, lse, [&](int i) { return bias_of_pair<T>(movmatrix_trans(x[i])); });
    }
  }

 private:
  static constexpr int KEYS = 16;  // of a warp

  __device__ __forceinline__ int query(int i) const { return min(i, work.seqlen_q - 1); }
  __device__ __forceinline__ int key(int i) const { return min(i, p.seqlen_k - 1); }

  // The next functions load 16-bit biases. Register 2 * n + h belongs to queries 8 * n to 8 * n + 7
  // and keys 8 * h to 8 * h + 7. Of these it holds query lane / 4 and the two keys from
  // 2 * (lane % 4) on. keys: query 0 and the warp's first key. At least KEYS adjacent keys exist
  // from there on, or more for fetch_rows().

  // Loads rows that begin at words of 4 bytes. NOTE: fetch_rows() waits for its loads before the
  // scores are there. At head_dim 128, no registers are left for this function.
  __device__ __forceinline__ void fetch_pairs(Fragment& x, const uint8_t* keys, int row0) const {
    const int lane = fresh_thread() % 32;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint8_t* at = keys + 2 * (query(row0 + 8 * n + lane / 4) * p.bias.row) + lane % 4 * 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) x[2 * n + h] = load_constant_4(at + 16 * h);
    }
  }

  // Loads any rows. Each lane loads a word: an instruction reads the 32 bytes of 4 queries, and
  // register 2 * n + e gets the words of queries 8 * n + e + 0, 2, 4, 6. If these begin within a
  // word, their words start with the second key, and the first ones come from another load, of 32
  // queries.
  __device__ __forceinline__ void fetch_rows(Fragment& x, const uint8_t* keys, int row0) const {
    const int lane = fresh_thread() % 32;
    const auto begin_of = [&](int i) { return keys + 2 * (query(row0 + i) * p.bias.row); };
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        // Biases have even addresses: the word from the first key on, or that behind it.
        const uint8_t* at = begin_of(8 * n + e + lane / 8 * 2) + lane % 8 * 4 + 2;
        x[2 * n + e] = load_constant_4(
            reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(at) & ~uintptr_t{3}));
      }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!begins_within_word(keys, row0 + e, 2 * p.bias.row)) continue;
      const uint32_t first = load_constant_2(begin_of(e + lane * 2));
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint32_t own_first = __shfl_sync(0xffffffffu, first, 4 * n + lane / 8);
        const uint32_t before = __shfl_up_sync(0xffffffffu, x[2 * n + e], 1);
        x[2 * n + e] = (lane % 8 > 0 ? before >> 16 : own_first) | x[2 * n + e] << 16;
      }
    }
    // Each lane keeps the words of its own keys, of an even and of an odd query.
    const bool upper = lane % 8 >= 4;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      uint32_t &even = x[2 * n], &odd = x[2 * n + 1];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? even : odd, 4);
      even = upper ? other : even;
      odd = upper ? odd : other;
    }
  }

  // Loads biases of any strides one by one. head: query 0 and key 0.
  __device__ __forceinline__ void fetch_elements(Fragment& x, const uint8_t* head, int row0,
                                                 int key0) const {
    const int lane = fresh_thread() % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int first = key0 + 8 * h + lane % 4 * 2;
      const int64_t left = 2 * (key(first) * p.bias.key);
      const int64_t right = 2 * (key(first + 1) * p.bias.key);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int64_t row = 2 * (query(row0 + 8 * n + lane / 4) * p.bias.row);
        x[2 * n + h] = load_bias_pair(head + left + row, head + right + row);
      }
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

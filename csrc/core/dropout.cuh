// Dropout of P. The seed, the offset, the batch entry (the document of packed sequences), the query
// head, the query and the key decide whether a weight is dropped. So kernels with different tiles
// drop the same weights.
//
// Philox4x32-7 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011: 7 rounds pass
// all of BigCrush) computes a 128-bit number from a Philox key and a counter: 16 bits for each of 8
// weights. A weight is kept if its 16 bits are below the threshold.
//
//   Philox key  seed
//   counter     {query / 16 * 8 + query % 8, key / 16 * 4 + key % 8 / 2, sequence_head, offset}
//   word        key / 8 % 2 * 2 + query / 8 % 2; its lower half for even keys, else its upper half
//
// The 8 weights are queries {q, q + 8} x keys {k, k + 1, k + 8, k + 9}: those that one lane has in
// the fragments of 16 x 16 scores S. In the fragments of S^T a lane has {k, k + 8} x {q, q + 1, q +
// 8, q + 9}: half of the weights of two 128-bit numbers. The lane of key k ^ 1 has the other
// halves. Each of the two lanes computes one number, and they exchange halves. So a kernel computes
// 1/8 of a number per weight, or 1/4 with tiles of only 8 keys or queries. S^T also takes 1/4 of a
// shuffle per weight.
#pragma once

#include "core/accumulator.cuh"
#include "core/params.h"
#include "ptx/permute.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

constexpr int PHILOX_ROUNDS = 7;

// The first query and key of a warp's scores, and batch * num_heads_q + head.
struct DropoutPlace {
  uint32_t sequence_head;
  int row0, key0;
};

// Returns the dropout parameters of a kernel whose Config has DROPS.
__device__ __forceinline__ const DropoutParams& dropout_of(const FwdParams& p) {
  return static_cast<const FwdDropoutParams&>(p).dropout;
}
__device__ __forceinline__ const DropoutParams& dropout_of(const BwdParams& p) {
  return static_cast<const BwdDropoutParams&>(p).dropout;
}
__device__ __forceinline__ const DropoutParams& dropout_of(const BiasGradientParams& p) {
  return static_cast<const BiasGradientDropoutParams&>(p).dropout;
}

template <class Params>
__device__ __forceinline__ uint32_t sequence_head(const Params& p, int batch, int head) {
  return batch * p.num_heads_kv * p.group + head;
}

// Replaces Philox counters with their random numbers.
template <int COUNT>
__device__ __forceinline__ void philox(uint32_t (&x)[COUNT][4], uint32_t key0, uint32_t key1) {
#pragma unroll
  for (int round = 0; round < PHILOX_ROUNDS; ++round) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const uint64_t left = uint64_t{0xd2511f53u} * x[i][0];
      const uint64_t right = uint64_t{0xcd9e8d57u} * x[i][2];
      x[i][0] = static_cast<uint32_t>(right >> 32) ^ x[i][1] ^ key0;
      x[i][2] = static_cast<uint32_t>(left >> 32) ^ x[i][3] ^ key1;
      x[i][1] = static_cast<uint32_t>(right);
      x[i][3] = static_cast<uint32_t>(left);
    }
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
}

// Exchanges halves of a random number with lane ^ 4, for 16 x 16 scores of S^T (see the top of this
// file). odd: true if the lane's key is odd.
__device__ __forceinline__ void exchange_halves(uint32_t (&words)[4], bool odd) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {  // scores of key 8 * h + lane / 4
    const uint32_t own = permute(words[2 * h], words[2 * h + 1], odd ? 0x7632 : 0x5410);
    const uint32_t give = permute(words[2 * h], words[2 * h + 1], odd ? 0x5410 : 0x7632);
    const uint32_t other = __shfl_xor_sync(0xffffffffu, give, 4);
    words[2 * h] = permute(own, other, odd ? 0x1054 : 0x5410);
    words[2 * h + 1] = permute(own, other, odd ? 0x3276 : 0x7632);
  }
  const uint32_t kept = words[1];  // the lane's first key and the second 8 queries
  words[1] = words[2];
  words[2] = kept;
}

// Draws 16 random bits for each score of MT tiles of 16 x 16, in the order of to_a_operand(): x[m]
// has the pairs {(row, column), (row, column + 1)} of rows lane / 4 + {0, 8} and columns lane % 4 *
// 2 + {0, 8}. Rows are queries, or keys if TRANSPOSED.
template <bool TRANSPOSED, int MT>
__device__ __forceinline__ void draw(uint32_t (&x)[MT][4], const DropoutParams& p,
                                     const DropoutPlace& at) {
  const int lane = fresh_thread() % 32;
  const int down = lane / 4, right = lane % 4, odd = down % 2;
  const int query = at.row0 / 16 * 8 + (TRANSPOSED ? right * 2 + odd : down);
  const int key = at.key0 / 16 * 4 + (TRANSPOSED ? down / 2 : right);
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    x[m][0] = query + (TRANSPOSED ? 0 : m * 8);
    x[m][1] = key + (TRANSPOSED ? m * 4 : 0);
    x[m][2] = at.sequence_head;
    x[m][3] = static_cast<uint32_t>(p.rng_state[1]);
  }
  const uint64_t seed = p.rng_state[0];
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  forget(key0, key1);  // the round keys are recomputed, instead of occupying 14 registers
  philox(x, key0, key1);
  if constexpr (TRANSPOSED) {
#pragma unroll
    for (int m = 0; m < MT; ++m) exchange_halves(x[m], odd);
  }
}

template <class Dropout>  // DropoutParams, or another struct with a member threshold
__device__ __forceinline__ bool keeps_low(uint32_t x, const Dropout& p) {
  return x << 16 < p.threshold;
}
template <class Dropout>
__device__ __forceinline__ bool keeps_high(uint32_t x, const Dropout& p) {
  return x < p.threshold;
}

// Drops elements of a 16 x 16 A operand. x: their random bits, from draw().
template <class Dropout>
__device__ __forceinline__ void drop_words(uint32_t (&a)[4], const uint32_t (&x)[4],
                                           const Dropout& p) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (!keeps_low(x[i], p)) a[i] &= 0xffff0000u;
    if (!keeps_high(x[i], p)) a[i] &= 0xffffu;
  }
}

// Draws random bits for an A operand of P, and sets its dropped elements to 0.
template <int MT>
__device__ __forceinline__ void drop_operand(uint32_t (&a)[MT][4], const DropoutParams& p,
                                             const DropoutPlace& at) {
#pragma unroll
  for (int m = 0; m < MT; ++m) {  // one row tile at a time, because O leaves few registers
    uint32_t x[1][4];
    draw<false>(x, p, {at.sequence_head, at.row0 + m * 16, at.key0});
    drop_words(a[m], x[0], p);
  }
}

// Calls each(m, n, i, kept) for all scores of a warp's fragments. Rows are queries, or keys if
// TRANSPOSED.
template <bool TRANSPOSED, int MT, int NT, class Each>
__device__ __forceinline__ void for_scores_kept(const DropoutParams& p, const DropoutPlace& at,
                                                const Each& each) {
  static_assert(NT == 1 || NT % 2 == 0);
  const int half = (TRANSPOSED ? at.row0 : at.key0) / 8 % 2;  // NT = 1: which 8 of 16 columns
#pragma unroll
  for (int j = 0; j < (NT + 1) / 2; ++j) {
    const int row0 = at.row0 + (TRANSPOSED ? j * 16 : 0),
              key0 = at.key0 + (TRANSPOSED ? 0 : j * 16);
    uint32_t x[MT][4];
    draw<TRANSPOSED>(x, p, {at.sequence_head, row0, key0});
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < (NT == 1 ? 1 : 2); ++n) {
          const bool second = NT == 1 ? half == 1 : n == 1;
          const uint32_t word = second ? x[m][2 + h] : x[m][h];
          each(m, 2 * j + n, 2 * h, keeps_low(word, p));
          each(m, 2 * j + n, 2 * h + 1, keeps_high(word, p));
        }
  }
}

// Sets c to 0 where the weight is dropped, and multiplies the other elements by `factor`.
template <bool TRANSPOSED = false, int MT, int NT>
__device__ __forceinline__ void drop(Accumulator<MT, NT>& c, const DropoutParams& p,
                                     const DropoutPlace& at, float factor = 1.0f) {
  for_scores_kept<TRANSPOSED, MT, NT>(p, at, [&](int m, int n, int i, bool kept) {
    c.x[m][n][i] = kept ? c.x[m][n][i] * factor : 0.0f;
  });
}

// Makes dropped weights in P^T negative, to mark them.
template <int MT, int NT>
__device__ __forceinline__ void mark_dropped(Accumulator<MT, NT>& pt, const DropoutParams& p,
                                             const DropoutPlace& at) {
  for_scores_kept<true, MT, NT>(p, at, [&](int m, int n, int i, bool kept) {
    pt.x[m][n][i] = kept ? pt.x[m][n][i] : -pt.x[m][n][i];
  });
}

// Sets x to 0 where pt is marked as dropped, and multiplies the other elements by `factor`.
template <int MT, int NT>
__device__ __forceinline__ void drop_marked(Accumulator<MT, NT>& x, const Accumulator<MT, NT>& pt,
                                            float factor) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool is_dropped = __float_as_int(pt.x[m][n][i]) < 0;
        x.x[m][n][i] = is_dropped ? 0.0f : x.x[m][n][i] * factor;
      }
}

// Sets the marked weights of an A operand to 0.
template <int MT>
__device__ __forceinline__ void drop_marked(uint32_t (&a)[MT][4]) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    // permute() spreads the sign of each 16-bit element over all of its bits.
    for (int i = 0; i < 4; ++i) a[m][i] &= ~permute(a[m][i], 0, 0xbb99);
}

}  // namespace flash_dist

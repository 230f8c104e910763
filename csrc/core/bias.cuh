// The bias of a call: one value per score, added like ALiBi. Calls with a soft cap have no bias. A
// value of MASKED or below masks the score.
#pragma once

#include "core/accumulator.cuh"
#include "core/params.h"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

// The lowest finite fp16 number. Additive masks in fp16 often use it instead of -inf.
constexpr float MASKED = -65504.0f;

// AddBias: for fp32, adds the bias after the score modification. BeginWithBias: for 16-bit dtypes,
// sets the accumulator to bias / softmax_scale before the product. Adding the bias later would need
// more registers for its addresses.
struct AddBias {
  __device__ __forceinline__ static void put(float& s, float bias, float) {
    s = bias <= MASKED ? -INFINITY : s + bias;
  }
};
struct BeginWithBias {
  __device__ __forceinline__ static void put(float& s, float bias, float factor) {
    s = bias <= MASKED ? -INFINITY : bias * factor;
  }
};

// Position of a warp's scores: batch entry, query head, first query row0 and first key key0.
struct BiasPlace {
  int batch, head, row0, key0;
};

// Loads elements of a bias, which is stored as T or fp32.
template <class T, bool IS_FP32>
struct BiasElements {
  static constexpr int BYTES = IS_FP32 ? 4 : 2;

  __device__ __forceinline__ static float one(const uint8_t* at) {
    if constexpr (IS_FP32) {
      return load_constant_float(at);
    } else {
      return unpack<T>(load_constant_2(at)).x;
    }
  }
  __device__ __forceinline__ static float2 two(const uint8_t* at) {
    if constexpr (IS_FP32) {
      return load_constant_float2(at);
    } else {
      return unpack<T>(load_constant_4(at));
    }
  }
};

// Calls Put::put() for scores and their bias. The rows of the scores are queries, from place.row0
// on. Rows past the last query get the last query's bias. Columns past the last key get bias 0.
template <class Elements, bool PAIRS, class Put, int MT, int NT>
__device__ __forceinline__ void add_bias_rows(Accumulator<MT, NT>& s, const BiasParams& p,
                                              const BiasPlace& place, int seqlen_q, int seqlen_k) {
  const int lane = fresh_thread() % 32;
  const int64_t row_stride = fresh(p.row), key_stride = PAIRS ? 1 : fresh(p.key);
  const int key = place.key0 + lane % 4 * 2;
  const uint8_t* head =
      static_cast<const uint8_t*>(p.data) +
      Elements::BYTES * (place.batch * p.batch + place.head * p.head + key * key_stride);
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(place.row0 + m * 16 + h * 8 + lane / 4, seqlen_q - 1);
      const uint8_t* at = head + Elements::BYTES * (row * row_stride);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float2 bias{0.0f, 0.0f};
        if constexpr (PAIRS) {
          if (key + n * 8 < seqlen_k) bias = Elements::two(at + Elements::BYTES * n * 8);
        } else {
          const uint8_t* here = at + Elements::BYTES * (n * 8 * key_stride);
          if (key + n * 8 < seqlen_k) bias.x = Elements::one(here);
          if (key + n * 8 + 1 < seqlen_k) {
            bias.y = Elements::one(here + Elements::BYTES * key_stride);
          }
        }
        Put::put(s.x[m][n][2 * h], bias.x, p.factor);
        Put::put(s.x[m][n][2 * h + 1], bias.y, p.factor);
      }
    }
}

// Like add_bias_rows(), for S^T, whose rows are keys.
template <class Elements, class Put, int MT, int NT>
__device__ __forceinline__ void add_bias_columns(Accumulator<MT, NT>& st, const BiasParams& p,
                                                 const BiasPlace& place, int seqlen_q,
                                                 int seqlen_k) {
  const int lane = fresh_thread() % 32;
  const int64_t row_stride = fresh(p.row), key_stride = fresh(p.key);
  const int key = place.key0 + lane / 4;
  const uint8_t* head =
      static_cast<const uint8_t*>(p.data) +
      Elements::BYTES * (place.batch * p.batch + place.head * p.head + key * key_stride);
#pragma unroll
  for (int n = 0; n < NT; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = min(place.row0 + n * 8 + lane % 4 * 2 + e, seqlen_q - 1);
      const uint8_t* at = head + Elements::BYTES * (row * row_stride);
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int down = m * 16 + h * 8;
          float bias = 0.0f;
          if (key + down < seqlen_k)
            bias = Elements::one(at + Elements::BYTES * (down * key_stride));
          Put::put(st.x[m][n][2 * h + e], bias, p.factor);
        }
    }
}

// Calls Put::put() for scores and the bias of a call, if it has one. PAIRS: also compile code that
// loads the bias of two adjacent keys at once.
template <class T, bool TRANSPOSED = false, class Put = AddBias, bool PAIRS = true, int MT, int NT>
__device__ __forceinline__ void add_bias(Accumulator<MT, NT>& s, const BiasParams& p,
                                         const BiasPlace& place, int seqlen_q, int seqlen_k) {
  constexpr bool HAS_16_BITS = std::is_same_v<T, Fp16> || std::is_same_v<T, Bf16>;
  const auto add = [&](auto elements) {
    using Elements = decltype(elements);
    if constexpr (TRANSPOSED) {
      add_bias_columns<Elements, Put>(s, p, place, seqlen_q, seqlen_k);
    } else if (PAIRS && p.in_pairs) {
      add_bias_rows<Elements, PAIRS, Put>(s, p, place, seqlen_q, seqlen_k);
    } else {
      add_bias_rows<Elements, false, Put>(s, p, place, seqlen_q, seqlen_k);
    }
  };
  if (p.data == nullptr) return;
  if (!HAS_16_BITS || p.is_fp32) {
    add(BiasElements<T, true>{});
  } else if constexpr (HAS_16_BITS) {
    add(BiasElements<T, false>{});
  }
}

}  // namespace flash_dist

// Biases in registers, for the Hopper kernels. A bias that masks its score (core/bias.cuh) becomes
// -inf.
#pragma once

#include "core/bias.cuh"
#include "ptx/copy.cuh"
#include "ptx/pairs.cuh"

namespace flash_dist {

// Returns whether a row of 16-bit biases begins within a word of 4 bytes. from: address of row 0.
__device__ __forceinline__ bool begins_within_word(const uint8_t* from, int row,
                                                   int64_t row_bytes) {
  const auto first = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from));
  return (first + row * static_cast<uint32_t>(row_bytes)) % 4 != 0;
}

// Loads two 16-bit biases, `left` to the lower half.
__device__ __forceinline__ uint32_t load_bias_pair(const uint8_t* left, const uint8_t* right) {
  return load_constant_2(left) | load_constant_2(right) << 16;
}

template <class T>
__device__ __forceinline__ float2 bias_of_pair(uint32_t pair) {
  // LOWEST: two copies of the largest value of the dtype that is not above MASKED.
  constexpr bool FP16 = std::is_same_v<T, Fp16>;
  constexpr uint32_t LOWEST = FP16 ? 0xfbfffbffu : 0xc780c780u;  // -65504, -65536
  constexpr uint32_t INFINITE = FP16 ? 0xfc00fc00u : 0xff80ff80u;
  const uint32_t masked = not_above<T>(pair, LOWEST);
  return unpack<T>((pair & ~masked) | (INFINITE & masked));
}

__device__ __forceinline__ float bias_of_fp32(uint32_t bits) {
  const float number = __uint_as_float(bits);
  return number <= MASKED ? -INFINITY : number;
}

}  // namespace flash_dist

// Numbers of a bias in registers, in Hopper's kernels: those that mask (core/bias.cuh) become -inf.
#pragma once

#include "core/bias.cuh"
#include "ptx/pairs.cuh"

namespace flash_dist {

template <class T>
__device__ __forceinline__ float2 bias_of_pair(uint32_t pair) {
  // In bf16 no number is between MASKED and the one that is named here.
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

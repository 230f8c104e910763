// csrc/ptx/convert.cuh in the emulator, for bfloat16 only.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_runtime_api.h"
#include "ptx/elements.h"

namespace flash_dist {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;

inline uint32_t round_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isnan(x)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <class Target, class T>
uint32_t pack(float low, float high) {
  static_assert(std::is_same_v<T, Bf16>);
  return round_to_bf16(low) | round_to_bf16(high) << 16;
}
template <class T>
float2 unpack(uint32_t x) {
  static_assert(std::is_same_v<T, Bf16>);
  const uint32_t low = x << 16, high = x & 0xffff0000u;
  float2 r;
  std::memcpy(&r.x, &low, 4);
  std::memcpy(&r.y, &high, 4);
  return r;
}

template <class T>
uint32_t relu(uint32_t x) {
  static_assert(std::is_same_v<T, Bf16>);
  return (x & 0x8000 ? 0 : x & 0xffff) | (x >> 31 ? 0 : x & 0xffff0000u);
}

inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline uint32_t shift_left(uint32_t x, int bits) { return bits < 32 ? x << bits : 0; }
inline float fma_saturated(float x, float y, float z) {
  return fminf(fmaxf(fmaf(x, y, z), 0.0f), 1.0f);
}

}  // namespace flash_dist

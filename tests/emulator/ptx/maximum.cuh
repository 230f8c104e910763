// csrc/ptx/maximum.cuh in the emulator, which runs blocks one after the other.
#pragma once

#include "ptx/convert.cuh"

namespace flash_dist {

inline float max_nan(float x, float y) { return x > y || x != x ? x : y; }

inline uint32_t max_bf16x2(uint32_t x, uint32_t y) {
  const float2 a = unpack<Bf16>(x), b = unpack<Bf16>(y);
  return pack<void, Bf16>(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
}

inline float load_relaxed(const float* number) { return *number; }

}  // namespace flash_dist

// csrc/ptx/pairs.cuh in the emulator.
#pragma once

#include "ptx/convert.cuh"

namespace flash_dist {

template <class T>
uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  const float2 a = unpack<T>(x), b = unpack<T>(y);
  return pack<void, T>(a.x * b.x, a.y * b.y);
}

}  // namespace flash_dist

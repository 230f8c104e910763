// csrc/ptx/pairs.cuh in the emulator.
#pragma once

#include "ptx/convert.cuh"

namespace flash_dist {

template <class T>
uint32_t multiply_pairs(uint32_t x, uint32_t y) {
  const float2 a = unpack<T>(x), b = unpack<T>(y);
  return pack<void, T>(a.x * b.x, a.y * b.y);
}

template <class T>
uint32_t not_above(uint32_t x, uint32_t y) {
  const float2 left = unpack<T>(x), right = unpack<T>(y);
  return (left.x <= right.x ? 0xffffu : 0) | (left.y <= right.y ? 0xffff0000u : 0);
}

}  // namespace flash_dist

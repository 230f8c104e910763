// The factor of dS where it is rounded to 16 bits. dP = dO @ V.T grows with head_dim, dO and V: in
// fp16, which ends at 65504, dS would overflow long before dQ and dK, which are sums of
// softmax_scale * dS. A power of two is exact unless the result is subnormal; 1 / 4 keeps the gradients
// of a small dO, 1e-3 say, as accurate as torch's in fp16, 1 / 8 does not. delta has the factor, too, and
// dQ and dK are scaled back.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/band.h"
#include "ptx/elements.h"

namespace flash_dist {

constexpr float FP16_DS_SCALE = 1.0f / 4;

template <class T>
constexpr float DS_SCALE = std::is_same_v<T, Fp16> ? FP16_DS_SCALE : 1.0f;

// The factor on sums of dS for dQ and dK.
template <class T>
FLASH_DIST_HOST_DEVICE constexpr float gradient_scale(float softmax_scale) {
  return DS_SCALE<T> == 1.0f ? softmax_scale : softmax_scale * (1.0f / DS_SCALE<T>);
}

// dP - delta, with the factor. dp: without it; delta: with it, as the delta kernel wrote it.
template <class T>
FLASH_DIST_HOST_DEVICE float minus_delta(float dp, float delta) {
  if constexpr (DS_SCALE<T> == 1.0f) return dp - delta;
  return fmaf(dp, DS_SCALE<T>, -delta);
}

}  // namespace flash_dist

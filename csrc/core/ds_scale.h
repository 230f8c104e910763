// dS is multiplied by DS_SCALE before it is rounded to fp16; for other dtypes the factor is 1.
// dP = dO @ V.T grows with head_dim, dO and V. The largest fp16 number is 65504: dS would overflow
// long before dQ and dK, which sum softmax_scale * dS. A power of two is exact unless the result is
// subnormal. With 1 / 4 the gradients of a small dO (1e-3) are as accurate as torch's in fp16; with
// 1 / 8 they are not. delta is multiplied by DS_SCALE, too. dQ and dK are divided by it.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/band.h"
#include "ptx/elements.h"

namespace flash_dist {

constexpr float FP16_DS_SCALE = 1.0f / 4;

template <class T>
constexpr float DS_SCALE = std::is_same_v<T, Fp16> ? FP16_DS_SCALE : 1.0f;

// Returns the factor that turns sums of dS into dQ and dK.
template <class T>
FLASH_DIST_HOST_DEVICE constexpr float gradient_scale(float softmax_scale) {
  return DS_SCALE<T> == 1.0f ? softmax_scale : softmax_scale * (1.0f / DS_SCALE<T>);
}

// Returns DS_SCALE * (dP - delta). dp is unscaled; the delta kernel has already scaled delta.
template <class T>
FLASH_DIST_HOST_DEVICE float minus_delta(float dp, float delta) {
  if constexpr (DS_SCALE<T> == 1.0f) return dp - delta;
  return fmaf(dp, DS_SCALE<T>, -delta);
}

}  // namespace flash_dist

// The values of the axes that tell the kernels of a role apart.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <vector>

#include "product.h"
#include "roles.h"

namespace KERNEL_NAMESPACE {

// Values of the axes of a key: words by number (see roles.h), then sizes.
using Values = std::array<int, KEY_AXES>;

// Returns the compiled sizes with the least sum that are not below those of a call. Among equal
// sums the one with the least last size wins: 160 and 128 take 192/128, not 160/160. Words are
// ignored. Returns all 0 if there are no such sizes.
inline Values smallest_holding(const std::vector<Values>& compiled, const Values& values) {
  const auto rank = [](const Values& one) {
    std::vector<int> order(one.rbegin(), one.rend() - WORD_AXES);
    order.insert(order.begin(), std::accumulate(order.begin(), order.end(), 0));
    return order;
  };
  const Values* best = nullptr;
  for (const Values& one : compiled) {
    const bool holds = std::equal(one.begin() + WORD_AXES, one.end(), values.begin() + WORD_AXES,
                                  std::greater_equal<int>());
    if (holds && (best == nullptr || rank(one) < rank(*best))) best = &one;
  }
  return best == nullptr ? Values{} : *best;
}

// Returns each compiled combination of words, with 0 for all sizes. Combinations that differ from
// the call on fewer axes come first.
inline std::vector<Values> nearest_words(const std::vector<Values>& compiled,
                                         const Values& values) {
  std::vector<Values> found;
  for (Values one : compiled) {
    std::fill(one.begin() + WORD_AXES, one.end(), 0);
    if (std::find(found.begin(), found.end(), one) == found.end()) found.push_back(one);
  }
  const auto distance = [&](const Values& one) {
    int count = 0;
    for (int axis = 0; axis < WORD_AXES; ++axis) count += one[axis] != values[axis];
    return count;
  };
  std::stable_sort(found.begin(), found.end(),
                   [&](const Values& a, const Values& b) { return distance(a) < distance(b); });
  return found;
}

}  // namespace KERNEL_NAMESPACE

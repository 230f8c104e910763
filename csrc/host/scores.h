// Computes the parameters that the host derives from the caller's scores, bias and dropout.
#pragma once

#include <algorithm>
#include <cmath>

#include "core/params.h"

namespace flash_dist {

template <class Params>
bool has_bias(const Params&) {
  return false;
}
inline bool has_bias(const FwdParams& p) { return p.bias.data != nullptr; }
inline bool has_bias(const BwdParams& p) { return p.bias.data != nullptr; }

template <class Params>
void set_bias_factor(Params&) {}
inline void set_bias_factor(FwdParams& p) { p.bias.factor = 1.0f / p.softmax_scale; }
inline void set_bias_factor(BwdParams& p) { p.bias.factor = 1.0f / p.softmax_scale; }

// Returns the parameters of dropout with probability p, which is rounded to a multiple of 1 / 65536
// and limited to 1 - 1 / 65536. Returns {} (no dropout) if p rounds to 0. rng_state: [2] seed and
// offset, on the device.
inline DropoutParams make_dropout(double p, const int64_t* rng_state) {
  const double kept = std::max(std::floor((1.0 - p) * 65536.0 + 0.5), 1.0);
  if (kept == 65536.0) return {};
  return {rng_state, static_cast<uint32_t>(kept) << 16, static_cast<float>(65536.0 / kept)};
}

// Computes the fields of p.scores and p.bias marked "filled in at the call". Returns the result.
template <class Params>
Params with_scores(Params p) {
  ScoreParams& scores = p.scores;
  scores.has_score_mod = scores.softcap != 0.0f || scores.alibi != nullptr || has_bias(p);
  scores.scale = scores.has_score_mod ? 1.0f : p.softmax_scale;
  scores.per_cap = scores.softcap == 0.0f ? 0.0f : 1.0f / scores.softcap;
  scores.scale_inside = p.softmax_scale / (scores.softcap == 0.0f ? 1.0f : scores.softcap);
  set_bias_factor(p);
  return p;
}

}  // namespace flash_dist

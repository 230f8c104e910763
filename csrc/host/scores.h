// What follows from what a call does to its scores.
#pragma once

#include "core/params.h"

namespace flash_dist {

// The parameters of a call with the fields of ScoreParams that are filled in.
template <class Params>
Params with_scores(Params p) {
  ScoreParams& scores = p.scores;
  scores.has_score_mod = scores.softcap != 0.0f || scores.alibi != nullptr;
  scores.scale = scores.has_score_mod ? 1.0f : p.softmax_scale;
  scores.per_cap = scores.softcap == 0.0f ? 0.0f : 1.0f / scores.softcap;
  scores.scale_inside = p.softmax_scale / (scores.softcap == 0.0f ? 1.0f : scores.softcap);
  return p;
}

}  // namespace flash_dist

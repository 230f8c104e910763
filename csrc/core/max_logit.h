// Parameters of the kernels that find the largest score of each query head.
#pragma once

#include "core/params.h"

namespace flash_dist {

struct MaxLogitParams {
  FwdParams p;
  float* max_logit;  // [num_heads_q], over all batch entries; -inf before the launch
  bool few_alone;    // packed: skip sequences without is_few_queries()
};

// Parameters of the launch of a forward that also finds the largest scores.
struct FwdMaxLogitCall : FwdCall {
  float* max_logit;
};

}  // namespace flash_dist

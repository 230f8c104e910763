// Adds entries to the record of plans before the launches of each call (native/recording.h). Block
// order, tile scheduler and number of combining blocks are left out: they only affect speed.
#pragma once

#include "core/decode.h"
#include "core/params.h"
#include "host/plan.h"

namespace flash_dist {

void record_forward(const FwdParams& p);
void record_backward(const BwdParams& p, const BwdPlan& plan);
// Records attention to a cache. softmax_blocks: key blocks per softmax.
void record_decode(const DecodeParams& p, int softmax_blocks);
}  // namespace flash_dist

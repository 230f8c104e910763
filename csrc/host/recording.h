// The entries of a record of plans: each call before its launches (native/recording.h). What decides
// the speed of a call alone is left out: the order of blocks, tickets, how many blocks combine partial
// results.
#pragma once

#include "core/decode.h"
#include "core/params.h"
#include "host/plan.h"

namespace flash_dist {

void record_forward(const FwdParams& p);
void record_backward(const BwdParams& p, const BwdPlan& plan);
// softmax_blocks: key blocks of one softmax.
void record_decode(const DecodeParams& p, int softmax_blocks);
}  // namespace flash_dist

// A record of what the host decides about the calls of this process, for whoever asks for it
// (flash_dist_record_plans). While nobody does, a call pays for one load of an atomic.
//
// It holds each call before its launches, and each launch as its kernel. What decides the speed of a
// call alone is left out: the order of blocks, tickets, how many blocks combine partial results.
#pragma once

#include <atomic>
#include <string>

#include "core/decode.h"
#include "core/params.h"
#include "host/plan.h"

namespace flash_dist {

extern std::atomic<bool> recording;

inline bool is_recording() { return recording.load(std::memory_order_relaxed); }

void record_forward(const FwdParams& p);
void record_backward(const BwdParams& p, const BwdPlan& plan);
// part_units: of what is computed in one softmax.
void record_decode(const DecodeParams& p, int part_units);
void record_launch(const char* symbol);

// What was recorded since recording began last, as a JSON list.
std::string recorded_plans();
void begin_recording();
void end_recording();

}  // namespace flash_dist

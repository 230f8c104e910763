// A record of what the host decides about the calls of this process, for a caller who asks for it
// (record_plans of the C interface). While nobody does, a call pays for one load of an atomic.
//
// The package adds an entry for each call, the dispatcher one for each launch.
#pragma once

#include <atomic>
#include <string>

#include "product.h"

namespace KERNEL_NAMESPACE {

extern std::atomic<bool> recording;

inline bool is_recording() { return recording.load(std::memory_order_relaxed); }

// Add an entry: JSON. Call it while is_recording() alone.
void record(const std::string& entry);
void record_launch(const char* symbol);

// What was recorded since recording began last, as a JSON list.
std::string recorded_plans();
void begin_recording();
void end_recording();

}  // namespace KERNEL_NAMESPACE

// A record of the host's decisions on the calls of this process, if a caller requests it
// (record_plans of the C interface). Otherwise a call only loads one atomic.
//
// The package adds an entry for each call, the dispatcher one for each launch.
#pragma once

#include <atomic>
#include <string>

#include "product.h"

namespace KERNEL_NAMESPACE {

extern std::atomic<bool> recording;

inline bool is_recording() { return recording.load(std::memory_order_relaxed); }

// Adds an entry, which is JSON. Call this only while is_recording().
void record(const std::string& entry);
void record_launch(const char* symbol);

// Returns the entries since recording last began, as a JSON list.
std::string recorded_plans();
void begin_recording();
void end_recording();

}  // namespace KERNEL_NAMESPACE

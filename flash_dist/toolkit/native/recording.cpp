#include "native/recording.h"

#include <mutex>
#include <vector>

#include "native/json.h"

namespace KERNEL_NAMESPACE {

std::atomic<bool> recording{false};

namespace {

// The entries of all threads: autograd runs backward in a separate thread.
struct Record {
  std::mutex mutex;
  std::vector<std::string> entries;
};

Record& all() {
  static Record* const one = new Record;  // never destroyed: threads may use it during exit
  return *one;
}

}  // namespace

void record(const std::string& entry) {
  const std::lock_guard<std::mutex> lock(all().mutex);
  all().entries.push_back(entry);
}

void record_launch(const char* symbol) {
  if (is_recording()) record("{\"kernel\": " + json_string(symbol) + "}");
}

std::string recorded_plans() {
  const std::lock_guard<std::mutex> lock(all().mutex);
  return json_list(all().entries, [](std::ostream& text, const std::string& one) { text << one; });
}

void begin_recording() {
  const std::lock_guard<std::mutex> lock(all().mutex);
  all().entries.clear();
  recording.store(true, std::memory_order_relaxed);
}

void end_recording() { recording.store(false, std::memory_order_relaxed); }

}  // namespace KERNEL_NAMESPACE

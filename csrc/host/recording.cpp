#include "host/recording.h"

#include <limits>
#include <mutex>
#include <sstream>
#include <vector>

#include "host/plan_json.h"

namespace flash_dist {

std::atomic<bool> recording{false};

namespace {

// Of all threads: autograd runs a backward in one of its own.
struct Record {
  std::mutex mutex;
  std::vector<std::string> entries;
};

Record& record() {
  static Record* const one = new Record;  // outlives whatever the end of the process destroys
  return *one;
}

void add(const std::string& entry) {
  Record& known = record();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.entries.push_back(entry);
}

// The softmax scale, then what scores are multiplied by as they are bent.
std::string describe_scores(float softmax_scale, const ScoreParams& scores) {
  std::ostringstream text;
  text.precision(std::numeric_limits<float>::max_digits10);
  text << "[" << softmax_scale << ", " << scores.bends << ", " << scores.scale << ", "
       << scores.scale_inside << ", " << scores.per_cap << "]";
  return text.str();
}

template <class Mask>  // MaskParams, DecodeParams
std::string describe_band(const Mask& mask) {
  std::ostringstream text;
  text << "[" << mask.left << ", " << mask.right << ", " << mask.bottom_right << "]";
  return text.str();
}

template <class Params>
std::string describe_call(const char* name, const Params& p) {
  std::ostringstream text;
  text << "{\"call\": \"" << name << "\", \"mask\": " << static_cast<int>(p.mask.kind)
       << ", \"band\": " << describe_band(p.mask)
       << ", \"scores\": " << describe_scores(p.softmax_scale, p.scores);
  return text.str();
}

}  // namespace

void record_forward(const FwdParams& p) {
  if (!is_recording()) return;
  add(describe_call("fwd", p) + ", \"leaves_few\": " + json_boolean(p.leaves_few != 0) + "}");
}

void record_backward(const BwdParams& p, const BwdPlan& plan) {
  if (!is_recording()) return;
  add(describe_call("bwd", p) + ", \"batch_invariant\": " + json_boolean(p.batch_invariant) +
      ", \"plan\": " + describe_plan(plan) + "}");
}

void record_decode(const DecodeParams& p, int part_units) {
  if (!is_recording()) return;
  std::ostringstream text;
  text << "{\"call\": \"decode\", \"band\": " << describe_band(p)
       << ", \"scores\": " << describe_scores(p.softmax_scale, p.scores)
       << ", \"task_rows\": " << p.task_rows << ", \"row_tiles\": " << p.row_tiles
       << ", \"tile_rows\": " << p.tile_rows << ", \"columns\": " << p.columns
       << ", \"part_units\": " << part_units << ", \"shares\": " << p.shares
       << ", \"max_units\": " << p.max_units
       << ", \"tiles_differ\": " << json_boolean(p.tiles_differ != 0) << "}";
  add(text.str());
}

void record_launch(const char* symbol) {
  if (!is_recording()) return;
  add(std::string("{\"kernel\": \"") + symbol + "\"}");
}

std::string recorded_plans() {
  Record& known = record();
  const std::lock_guard<std::mutex> lock(known.mutex);
  return json_list(known.entries, [](std::ostream& text, const std::string& one) { text << one; });
}

void begin_recording() {
  Record& known = record();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.entries.clear();
  recording.store(true, std::memory_order_relaxed);
}

void end_recording() { recording.store(false, std::memory_order_relaxed); }

}  // namespace flash_dist

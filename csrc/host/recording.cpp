#include "host/recording.h"

#include <limits>
#include <sstream>
#include <string>

#include "host/plan_json.h"
#include "native/recording.h"

namespace flash_dist {

namespace {

// Describes softmax_scale, and the fields of ScoreParams that are filled in at the call.
std::string describe_scores(float softmax_scale, const ScoreParams& scores) {
  std::ostringstream text;
  text.precision(std::numeric_limits<float>::max_digits10);
  text << "[" << softmax_scale << ", " << scores.has_score_mod << ", " << scores.scale << ", "
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
  record(describe_call("fwd", p) + ", \"leaves_few\": " + json_boolean(p.leaves_few != 0) + "}");
}

void record_backward(const BwdParams& p, const BwdPlan& plan) {
  if (!is_recording()) return;
  record(describe_call("bwd", p) + ", \"batch_invariant\": " + json_boolean(p.batch_invariant) +
         ", \"plan\": " + describe_plan(plan) + "}");
}

void record_decode(const DecodeParams& p, int softmax_blocks) {
  if (!is_recording()) return;
  std::ostringstream text;
  text << "{\"call\": \"decode\", \"band\": " << describe_band(p)
       << ", \"scores\": " << describe_scores(p.softmax_scale, p.scores)
       << ", \"task_rows\": " << p.block_rows << ", \"row_tiles\": " << p.row_tiles
       << ", \"tile_rows\": " << p.partial_rows << ", \"columns\": " << p.columns
       << ", \"part_units\": " << softmax_blocks << ", \"shares\": " << p.splits
       << ", \"max_units\": " << p.max_key_blocks
       << ", \"tiles_differ\": " << json_boolean(p.tiles_differ != 0) << "}";
  record(text.str());
}

}  // namespace flash_dist

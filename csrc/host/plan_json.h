// Writes the plan of a backward as JSON. Different plans have different texts.
#pragma once

#include <sstream>
#include <string>

#include "host/plan.h"
#include "native/json.h"

namespace flash_dist {

inline void write_chunk(std::ostream& text, const BwdChunk& c) {
  text << "{\"unit_begin\": " << c.unit_begin << ", \"units\": " << c.units
       << ", \"key_begin\": " << c.key_begin << ", \"key_end\": " << c.key_end
       << ", \"first_stripe\": " << json_boolean(c.dq_first)
       << ", \"last_stripe\": " << json_boolean(c.dq_last)
       << ", \"member_begin\": " << c.member_begin << ", \"members\": " << c.members
       << ", \"query_begin\": " << c.query_begin << ", \"query_end\": " << c.query_end
       << ", \"sums_first\": " << json_boolean(c.sums_first)
       << ", \"sums_last\": " << json_boolean(c.sums_last) << ", \"sum_rows\": ["
       << c.sum_rows.first << ", " << c.sum_rows.split << ", " << c.sum_rows.unit
       << "], \"dq_accum\": " << c.dq_accum << "}";
}

inline void write_step(std::ostream& text, const BwdStep& s) {
  text << "{\"role\": \"" << role_name(s.role) << "\", \"size\": [" << s.size.head_dim << ", "
       << s.size.head_dim_v << "], \"chunk\": " << s.chunk << "}";
}

inline std::string describe_plan(const BwdPlan& plan) {
  std::ostringstream text;
  text << "{\"spill\": " << json_boolean(plan.spill) << ", \"group_split\": " << plan.group_split
       << ", \"rows_padded\": " << plan.rows_padded
       << ", \"ds_tiles_per_head\": " << plan.ds_tiles_per_head << ", \"ds\": " << plan.ds
       << ", \"dq_accum\": " << plan.dq_accum << ", \"dk_partial\": " << plan.dk_partial
       << ", \"dv_partial\": " << plan.dv_partial << ", \"statistics\": " << plan.statistics
       << ", \"chunks\": " << json_list(plan.chunks, write_chunk)
       << ", \"steps\": " << json_list(plan.steps, write_step);
  if (plan.fused) {
    text << ", \"fused\": true, \"dq_turns\": " << plan.dq_turns
         << ", \"query_split\": " << plan.query_split << ", \"stripe_rows\": " << plan.stripe_rows
         << ", \"first_keys_first\": " << json_boolean(plan.first_keys_first)
         << ", \"waits\": " << json_boolean(plan.waits);
  }
  return text.str() + "}";
}

}  // namespace flash_dist

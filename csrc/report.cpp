// What the library says about itself, as JSON.
#include <cstdio>
#include <cstring>
#include <set>
#include <sstream>
#include <string>

#include "capi.h"
#include "dispatch.h"
#include "plan.h"
#include "status.h"

namespace flash_dist {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

namespace {

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", c);
      result += escape;
    } else {
      result += c;
    }
  }
  return result + "\"";
}

// "[a, b]" or "{a, b}" from parts written one after the other.
class List {
 public:
  explicit List(const char* brackets) : brackets_(brackets) { text_ << brackets[0]; }
  std::ostream& next() {
    if (count_++ > 0) text_ << ", ";
    return text_;
  }
  std::string str() const { return text_.str() + brackets_[1]; }

 private:
  const char* brackets_;
  std::ostringstream text_;
  int count_ = 0;
};

std::string key_fields(const Variant& v) {
  std::ostringstream text;
  text << "\"family\": " << quoted(v.family) << ", \"dtype\": " << quoted(v.dtype)
       << ", \"head_dim\": " << v.head_dim << ", \"head_dim_v\": " << v.head_dim_v;
  return text.str();
}

std::string describe_variants() {
  List list("[]");
  for (const Variant& v : all_variants()) {
    list.next() << "{\"symbol\": " << quoted(v.symbol) << ", " << key_fields(v)
                << ", \"plan\": " << v.plan << ", \"target\": " << quoted(v.target())
                << ", \"threads\": " << v.entry->threads
                << ", \"dynamic_smem\": " << v.entry->dynamic_smem << "}";
  }
  return list.str();
}

std::string loaded_fields(const Selection& selection) {
  std::ostringstream text;
  text << "\"symbol\": " << quoted(selection.chosen->symbol)
       << ", \"plan\": " << selection.chosen->plan
       << ", \"binary_version\": " << selection.binary_version
       << ", \"ptx_version\": " << selection.ptx_version;
  return text.str();
}

// What a caller asked for; null and 0 match anything.
struct Filter {
  const char* family;
  const char* dtype;
  int head_dim, head_dim_v;

  bool operator()(const Variant& v) const {
    return (family == nullptr || !std::strcmp(family, v.family)) &&
           (dtype == nullptr || !std::strcmp(dtype, v.dtype)) &&
           (head_dim == 0 || is_meant(v, {v.family, v.dtype, head_dim, head_dim_v}));
  }
};

std::string describe_selection(int device, const Filter& wanted) {
  List list("[]");
  std::set<std::string> seen;
  for (const Variant& v : all_variants()) {
    if (!wanted(v) || !seen.insert(key_fields(v)).second) continue;
    const Selection& selection =
        select_kernel(device, {v.family, v.dtype, v.head_dim, v.head_dim_v});
    List refused("[]");
    for (const Refusal& refusal : selection.refused) {
      refused.next() << "{\"symbol\": " << quoted(refusal.variant->symbol)
                     << ", \"reason\": " << quoted(refusal.reason) << "}";
    }
    list.next() << "{" << key_fields(v) << ", \"chosen\": "
                << (selection.chosen == nullptr ? "null" : "{" + loaded_fields(selection) + "}")
                << ", \"refused\": " << refused.str() << "}";
  }
  return list.str();
}

std::string describe_last() {
  List list("{}");
  for (const LastVariant& last : last_variants()) {
    list.next() << quoted(last.family) << ": {\"device\": " << last.device << ", "
                << loaded_fields(last.selection) << "}";
  }
  return list.str();
}

const char* boolean(bool value) { return value ? "true" : "false"; }

std::string describe_plan(const BwdPlan& plan) {
  List chunks("[]");
  for (const BwdChunk& c : plan.chunks) {
    chunks.next() << "{\"unit_begin\": " << c.unit_begin << ", \"units\": " << c.units
                  << ", \"key_begin\": " << c.key_begin << ", \"key_end\": " << c.key_end
                  << ", \"first_stripe\": " << boolean(c.first_stripe)
                  << ", \"last_stripe\": " << boolean(c.last_stripe) << "}";
  }
  std::ostringstream text;
  text << "{\"spill\": " << boolean(plan.spill) << ", \"group_split\": " << plan.group_split
       << ", \"rows_padded\": " << plan.rows_padded
       << ", \"ds_tiles_per_head\": " << plan.ds_tiles_per_head << ", \"ds\": " << plan.ds
       << ", \"dq_accum\": " << plan.dq_accum << ", \"dk_partial\": " << plan.dk_partial
       << ", \"dv_partial\": " << plan.dv_partial << ", \"statistics\": " << plan.statistics
       << ", \"chunks\": " << chunks.str() << "}";
  return text.str();
}

int64_t copy_out(const std::string& text, char* buffer, int64_t size) {
  if (buffer != nullptr && size > static_cast<int64_t>(text.size()))
    std::memcpy(buffer, text.c_str(), text.size() + 1);
  return static_cast<int64_t>(text.size());
}

}  // namespace

}  // namespace flash_dist

using namespace flash_dist;

const char* flash_dist_last_error() { return last_error().c_str(); }

int64_t flash_dist_variants_json(char* buffer, int64_t size) {
  return guarded([&] { return copy_out(describe_variants(), buffer, size); });
}

int64_t flash_dist_select_json(int device, const char* family, const char* dtype, int head_dim,
                               int head_dim_v, char* buffer, int64_t size) {
  return guarded([&] {
    const Filter wanted{family, dtype, head_dim, head_dim_v};
    return copy_out(describe_selection(device, wanted), buffer, size);
  });
}

int64_t flash_dist_last_variant_json(char* buffer, int64_t size) {
  return guarded([&] { return copy_out(describe_last(), buffer, size); });
}

int64_t flash_dist_plan_json(const int32_t* shape, const int32_t* kernels,
                             const BwdOptions* options, char* buffer, int64_t size) {
  return guarded([&] {
    BwdShape s{shape[0], shape[1], shape[2], shape[3], shape[4],
               shape[5], shape[6], shape[7], {},       options->key_slots};
    s.mask.kind = static_cast<MaskKind>(shape[8]);
    s.mask.left = shape[9] < 0 ? UNBOUNDED : shape[9];
    s.mask.right = shape[10] < 0 ? UNBOUNDED : shape[10];
    s.mask.bottom_right = shape[11];
    const BwdPlan plan =
        plan_backward(s, {kernels[0], kernels[1], kernels[2], kernels[3], kernels[4]},
                      options->budget, options->batch_invariant != 0);
    return copy_out(describe_plan(plan), buffer, size);
  });
}

// Describes the library's variants, choices and launches as JSON.
#include "native/report.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <sstream>
#include <string>

#include "native/check.h"
#include "native/dispatch.h"
#include "native/json.h"
#include "native/recording.h"
#include "native/status.h"

namespace KERNEL_NAMESPACE {

std::string& last_error() {
  thread_local std::string text;
  return text;
}

namespace {

// Builds "[a, b]" or "{a, b}"; the caller writes each item to next().
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

// Returns the JSON fields of a variant's role and axes. Variants of different families and targets
// may have the same fields.
std::string key_fields(const Variant& v) {
  std::ostringstream text;
  text << "\"role\": " << json_string(role_name(v.role));
  for (int axis = 0; axis < KEY_AXES; ++axis) {
    text << ", \"" << AXIS_NAMES[axis] << "\": ";
    if (axis < WORD_AXES) {
      text << json_string(word_name(axis, v.values[axis]));
    } else {
      text << v.values[axis];
    }
  }
  return text.str();
}

std::string describe_variants() {
  List list("[]");
  for (const Variant& v : all_variants()) {
    list.next() << "{\"symbol\": " << json_string(v.symbol) << ", " << key_fields(v)
                << ", \"family\": " << json_string(family_name(v.family)) << ", \"" << PLAN_AXIS
                << "\": " << v.plan << ", \"target\": " << json_string(v.target())
                << ", \"threads\": " << v.entry->threads
                << ", \"dynamic_smem\": " << v.entry->dynamic_smem << "}";
  }
  return list.str();
}

std::string loaded_fields(const Loaded& kernel) {
  std::ostringstream text;
  text << "\"symbol\": " << json_string(kernel.variant->symbol)
       << ", \"family\": " << json_string(family_name(kernel.variant->family)) << ", \""
       << PLAN_AXIS << "\": " << kernel.variant->plan
       << ", \"binary_version\": " << kernel.binary_version
       << ", \"ptx_version\": " << kernel.ptx_version;
  return text.str();
}

// Selects the variants that a question such as "role=fwd dtype=bf16 head_dim=80" asks for.
class Filter {
 public:
  explicit Filter(const char* question) {
    std::fill_n(values_.begin(), WORD_AXES, ANY);
    std::istringstream words(question);
    for (std::string word; words >> word;) add(word);
    for (int axis = WORD_AXES; axis < KEY_AXES; ++axis) {
      if (values_[axis] == 0 && DEFAULT_AXES[axis] >= 0)
        values_[axis] = values_[DEFAULT_AXES[axis]];
    }
  }

  bool operator()(const Variant& v) const {
    if (!role_.empty() && role_ != role_name(v.role)) return false;
    KernelKey key{v.role, v.values};
    for (int axis = 0; axis < WORD_AXES; ++axis) {
      if (values_[axis] != ANY && values_[axis] != v.values[axis]) return false;
    }
    std::copy(values_.begin() + WORD_AXES, values_.end(), key.values.begin() + WORD_AXES);
    return !has_sizes() || is_meant(v, key);
  }

 private:
  static constexpr int ANY = -1;

  bool has_sizes() const {
    return std::any_of(values_.begin() + WORD_AXES, values_.end(), [](int n) { return n != 0; });
  }

  void add(const std::string& word) {
    const size_t sign = std::min(word.find('='), word.size() - 1);
    const std::string name = word.substr(0, sign), value = word.substr(sign + 1);
    if (name == "role") {
      role_ = value;
      return;
    }
    for (int axis = 0; axis < KEY_AXES; ++axis) {
      if (name != AXIS_NAMES[axis]) continue;
      values_[axis] = axis < WORD_AXES ? word_number(axis, value) : std::atoi(value.c_str());
      return;
    }
    fail("a question must name role or an axis of a kernel, got `", word, "`");
  }

  static int word_number(int axis, const std::string& value) {
    for (int number = 0; number < word_count(axis); ++number) {
      if (value == word_name(axis, number)) return number;
    }
    fail(AXIS_NAMES[axis], " must be one that kernels are built for, got `", value, "`");
  }

  std::string role_;  // empty: any
  Values values_{};   // ANY for a word, or 0 for a size, matches every value
};

std::string describe_selection(int device, const Filter& wanted) {
  List list("[]");
  std::set<std::string> seen;
  for (const Variant& v : all_variants()) {
    if (!wanted(v) || !seen.insert(key_fields(v)).second) continue;
    const Selection selection = select_kernel(device, {v.role, v.values});
    if (selection.chosen.variant == nullptr && has_stand_ins(v.role)) continue;
    List refused("[]");
    for (const Refusal& refusal : selection.refused) {
      refused.next() << "{\"symbol\": " << json_string(refusal.variant->symbol)
                     << ", \"reason\": " << json_string(refusal.reason) << "}";
    }
    const bool found = selection.chosen.variant != nullptr;
    list.next() << "{" << key_fields(v) << ", \"chosen\": "
                << (found ? "{" + loaded_fields(selection.chosen) + "}" : "null")
                << ", \"refused\": " << refused.str() << "}";
  }
  return list.str();
}

std::string describe_last() {
  List list("{}");
  for (const LastVariant& last : last_variants()) {
    list.next() << json_string(role_name(last.kernel.variant->role))
                << ": {\"device\": " << last.device << ", " << loaded_fields(last.kernel) << "}";
  }
  return list.str();
}

int64_t copy_out(const std::string& text, char* buffer, int64_t size) {
  if (buffer != nullptr && size > static_cast<int64_t>(text.size()))
    std::memcpy(buffer, text.c_str(), text.size() + 1);
  return static_cast<int64_t>(text.size());
}

}  // namespace

}  // namespace KERNEL_NAMESPACE

using namespace KERNEL_NAMESPACE;

const char* KERNEL_C(last_error)() { return last_error().c_str(); }

int64_t KERNEL_C(variants_json)(char* buffer, int64_t size) {
  return guarded([&] { return copy_out(describe_variants(), buffer, size); });
}

int64_t KERNEL_C(select_json)(int device, const char* question, char* buffer, int64_t size) {
  return guarded(
      [&] { return copy_out(describe_selection(device, Filter(question)), buffer, size); });
}

int64_t KERNEL_C(last_variant_json)(char* buffer, int64_t size) {
  return guarded([&] { return copy_out(describe_last(), buffer, size); });
}

int KERNEL_C(record_plans)(int on) {
  return guarded([&] {
    if (on != 0) {
      begin_recording();
    } else {
      end_recording();
    }
    return 0;
  });
}

int64_t KERNEL_C(plans_json)(char* buffer, int64_t size) {
  return guarded([&] { return copy_out(recorded_plans(), buffer, size); });
}

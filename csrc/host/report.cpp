// What the library says about itself, as JSON.
#include <cstdio>
#include <cstring>
#include <set>
#include <sstream>
#include <string>

#include "host/capi.h"
#include "host/dispatch.h"
#include "host/recording.h"
#include "host/status.h"

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

// What distinguishes a kernel from others, whoever serves it.
std::string key_fields(const Variant& v) {
  std::ostringstream text;
  text << "\"role\": " << quoted(role_name(v.role))
       << ", \"dtype\": " << quoted(dtype_name(v.dtype)) << ", \"head_dim\": " << v.size.head_dim
       << ", \"head_dim_v\": " << v.size.head_dim_v;
  return text.str();
}

std::string describe_variants() {
  List list("[]");
  for (const Variant& v : all_variants()) {
    list.next() << "{\"symbol\": " << quoted(v.symbol) << ", " << key_fields(v)
                << ", \"family\": " << quoted(family_name(v.family)) << ", \"plan\": " << v.plan
                << ", \"target\": " << quoted(v.target()) << ", \"threads\": " << v.entry->threads
                << ", \"dynamic_smem\": " << v.entry->dynamic_smem << "}";
  }
  return list.str();
}

std::string loaded_fields(const Loaded& kernel) {
  std::ostringstream text;
  text << "\"symbol\": " << quoted(kernel.variant->symbol)
       << ", \"family\": " << quoted(family_name(kernel.variant->family))
       << ", \"plan\": " << kernel.variant->plan
       << ", \"binary_version\": " << kernel.binary_version
       << ", \"ptx_version\": " << kernel.ptx_version;
  return text.str();
}

// What a caller asked for; null and 0 match anything.
struct Filter {
  const char* role;
  const char* dtype;
  KernelSize columns;

  bool operator()(const Variant& v) const {
    return (role == nullptr || !std::strcmp(role, role_name(v.role))) &&
           (dtype == nullptr || !std::strcmp(dtype, dtype_name(v.dtype))) &&
           (columns.head_dim == 0 || is_meant(v, {v.role, v.dtype, columns}));
  }
};

std::string describe_selection(int device, const Filter& wanted) {
  List list("[]");
  std::set<std::string> seen;
  for (const Variant& v : all_variants()) {
    if (!wanted(v) || !seen.insert(key_fields(v)).second) continue;
    const Selection selection = select_kernel(device, {v.role, v.dtype, v.size});
    if (selection.chosen.variant == nullptr && has_stand_ins(v.role)) continue;
    List refused("[]");
    for (const Refusal& refusal : selection.refused) {
      refused.next() << "{\"symbol\": " << quoted(refusal.variant->symbol)
                     << ", \"reason\": " << quoted(refusal.reason) << "}";
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
    list.next() << quoted(role_name(last.kernel.variant->role)) << ": {\"device\": " << last.device
                << ", " << loaded_fields(last.kernel) << "}";
  }
  return list.str();
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

int64_t flash_dist_select_json(int device, const char* role, const char* dtype, int head_dim,
                               int head_dim_v, char* buffer, int64_t size) {
  return guarded([&] {
    const Filter wanted{role, dtype, {head_dim, head_dim_v}};
    return copy_out(describe_selection(device, wanted), buffer, size);
  });
}

int64_t flash_dist_last_variant_json(char* buffer, int64_t size) {
  return guarded([&] { return copy_out(describe_last(), buffer, size); });
}

int flash_dist_record_plans(int on) {
  return guarded([&] {
    if (on != 0) {
      begin_recording();
    } else {
      end_recording();
    }
    return 0;
  });
}

int64_t flash_dist_plans_json(char* buffer, int64_t size) {
  return guarded([&] { return copy_out(recorded_plans(), buffer, size); });
}

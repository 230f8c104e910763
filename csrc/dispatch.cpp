#include "dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "check.h"
#include "plans.h"

#define FLASH_DIST_VARIANT(symbol, family, dtype, head_dim, head_dim_v, plan, number, suffix, ptx) \
  extern "C" const flash_dist::KernelEntry symbol##_entry;
#include "variants.inc"
#undef FLASH_DIST_VARIANT

namespace flash_dist {

const std::vector<Variant>& all_variants() {
  static const std::vector<Variant> variants = {
#define FLASH_DIST_VARIANT(symbol, family, dtype, head_dim, head_dim_v, plan, number, suffix, ptx) \
  {#symbol, #family, #dtype, head_dim, head_dim_v, plan, number, suffix, ptx != 0, &symbol##_entry},
#include "variants.inc"
#undef FLASH_DIST_VARIANT
  };
  return variants;
}

std::string Variant::target() const {
  std::string text = (ptx ? "compute_" : "sm_") + std::to_string(number);
  if (suffix != '\0') text += suffix;
  return text;
}

DeviceScope::DeviceScope(int device) {
  int current = -1;
  check_cuda(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device) return;
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  previous_ = current;
}

DeviceScope::~DeviceScope() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

namespace {

using Size = std::pair<int, int>;  // head_dim, head_dim_v

bool same_kernel(const Variant& v, const KernelKey& key) {
  return !std::strcmp(v.family, key.family) && !std::strcmp(v.dtype, key.dtype);
}

Size size_of(const Variant& v) { return {v.head_dim, v.head_dim_v}; }

std::set<Size> compiled_sizes(const KernelKey& key) {
  std::set<Size> sizes;
  for (const Variant& v : all_variants()) {
    if (same_kernel(v, key)) sizes.insert(size_of(v));
  }
  return sizes;
}

// The size with the fewest columns in all that holds the call's, among equals the one with fewer of
// v: 160 and 128 take 192/128, not 160/160. {0, 0} if none does.
Size smallest_holding(const KernelKey& key) {
  Size best{0, 0};
  const auto rank = [](const Size& s) { return std::make_pair(s.first + s.second, s.second); };
  for (const Size& size : compiled_sizes(key)) {
    const bool holds = size.first >= key.head_dim && size.second >= key.head_dim_v;
    if (holds && (best.first == 0 || rank(size) < rank(best))) best = size;
  }
  return best;
}

std::mutex mutex;
std::map<int, std::unique_ptr<DeviceInfo>> devices;
std::map<std::tuple<int, std::string, std::string, Size>, std::unique_ptr<Selection>> selections;
// The same by what was asked for, with literals by address: what every launch looks up.
std::map<std::tuple<int, const char*, const char*, int, int>, const Selection*> asked;
std::map<const char*, std::pair<int, const Selection*>> last;

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

int smem_limit_asked() {
  const char* text = std::getenv("FLASH_DIST_SMEM_LIMIT");
  if (text == nullptr || *text == '\0') return INT32_MAX;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value <= 0 || value > INT32_MAX) {
    fail("FLASH_DIST_SMEM_LIMIT must be a number of bytes such as 65536, got `", text, "`");
  }
  return static_cast<int>(value);
}

std::unique_ptr<DeviceInfo> read_device(int device) {
  cudaDeviceProp properties;
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  auto info = std::make_unique<DeviceInfo>();
  info->name = properties.name;
  info->compute_capability = properties.major * 10 + properties.minor;
  info->sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
  info->l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
  info->smem_limit =
      std::min(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device), smem_limit_asked());
  return info;
}

// From best to worst: exact SASS, SASS of the same major (newest first), PTX (newest first), SASS
// that crosses between discrete and integrated GPUs of a major, which nobody promises; then the
// largest tile. The driver has the last word on each, so the rules of suffixes and families are not
// repeated here.
struct Preference {
  int device;

  bool possible(const Variant& v) const {
    return v.number <= device && (v.ptx || v.number / 10 == device / 10);
  }
  bool unpromised(const Variant& v) const {
    return !v.ptx && is_integrated(v.number) != is_integrated(device);
  }
  auto rank(const Variant& v) const {
    return std::make_tuple(unpromised(v), v.ptx, -v.number, v.suffix == '\0', -v.plan);
  }
  bool operator()(const Variant* a, const Variant* b) const { return rank(*a) < rank(*b); }
};

// Empty if the variant loads on the current device, else the reason.
std::string try_load(const Variant& v, const DeviceInfo& info, Selection& selection) {
  if (smem_plan_bytes(v.plan) > info.smem_limit && v.plan != 0) {
    return "needs up to " + std::to_string(smem_plan_bytes(v.plan)) +
           " bytes of shared memory per block, the limit is " + std::to_string(info.smem_limit);
  }
  cudaFuncAttributes attributes;
  cudaError_t status = cudaFuncGetAttributes(&attributes, v.entry->kernel);
  if (status == cudaSuccess && v.entry->dynamic_smem > 48 * 1024) {
    status = cudaFuncSetAttribute(v.entry->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  v.entry->dynamic_smem);
  }
  if (status != cudaSuccess) {
    cudaGetLastError();
    return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
  }
  selection.chosen = &v;
  selection.binary_version = attributes.binaryVersion;
  selection.ptx_version = attributes.ptxVersion;
  return {};
}

std::unique_ptr<Selection> choose(int device, const DeviceInfo& info, const KernelKey& key,
                                  const Size& size) {
  const Preference preference{info.compute_capability};
  std::vector<const Variant*> candidates;
  auto selection = std::make_unique<Selection>();
  for (const Variant& v : all_variants()) {
    if (!same_kernel(v, key) || size_of(v) != size) continue;
    if (preference.possible(v)) {
      candidates.push_back(&v);
    } else {
      selection->refused.push_back({&v, v.target() + " code cannot run on compute capability " +
                                            std::to_string(info.compute_capability / 10) + "." +
                                            std::to_string(info.compute_capability % 10)});
    }
  }
  std::sort(candidates.begin(), candidates.end(), preference);
  const DeviceScope scope(device);
  for (const Variant* v : candidates) {
    std::string reason = try_load(*v, info, *selection);
    if (reason.empty()) break;
    selection->refused.push_back({v, std::move(reason)});
  }
  return selection;
}

const DeviceInfo& device_info_locked(int device) {
  auto& info = devices[device];
  if (!info) info = read_device(device);
  return *info;
}

const Selection& select_locked(int device, const KernelKey& key) {
  auto& found = asked[{device, key.family, key.dtype, key.head_dim, key.head_dim_v}];
  if (found == nullptr) {
    const Size size = smallest_holding(key);
    auto& selection = selections[{device, key.family, key.dtype, size}];
    if (!selection) selection = choose(device, device_info_locked(device), key, size);
    found = selection.get();
  }
  return *found;
}

[[noreturn]] void refuse(int device, const KernelKey& key, const Selection& selection) {
  const DeviceInfo& info = device_info(device);
  std::ostringstream text;
  text << "no variant of kernel " << key.family << " for " << key.dtype << ", head_dim "
       << key.head_dim;
  if (key.head_dim_v != key.head_dim) text << ", head_dim_v " << key.head_dim_v;
  text << " runs on GPU " << device << " (" << info.name << ", compute capability "
       << info.compute_capability / 10 << "." << info.compute_capability % 10 << ")";
  const char* separator = ": ";
  for (const Refusal& refusal : selection.refused) {
    text << separator << refusal.variant->symbol << ": " << refusal.reason;
    separator = "; ";
  }
  if (selection.refused.empty()) {
    text << ": none is built in";
    separator = ", only head_dim ";
    for (const Size& size : compiled_sizes(key)) {
      text << separator << size.first;
      if (size.second != size.first) text << "/" << size.second;
      separator = ", ";
    }
  }
  text << "\n\nhint: `python -m flash_dist doctor` names the arch set to install";
  throw Error(text.str());
}

}  // namespace

bool is_meant(const Variant& variant, const KernelKey& key) {
  return same_kernel(variant, key) && size_of(variant) == smallest_holding(key);
}

const DeviceInfo& device_info(int device) {
  const std::lock_guard<std::mutex> lock(mutex);
  return device_info_locked(device);
}

const Selection& select_kernel(int device, const KernelKey& key) {
  const std::lock_guard<std::mutex> lock(mutex);
  return select_locked(device, key);
}

const Variant& require_kernel(int device, const KernelKey& key) {
  const Selection& selection = select_kernel(device, key);
  if (selection.chosen == nullptr) refuse(device, key, selection);
  return *selection.chosen;
}

void launch(int device, const KernelKey& key, const void* params, cudaStream_t stream) {
  const Selection* selection;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    selection = &select_locked(device, key);
    if (selection->chosen != nullptr) last[key.family] = {device, selection};
  }
  if (selection->chosen == nullptr) refuse(device, key, *selection);
  const Variant& variant = *selection->chosen;
  check_cuda(variant.entry->launch(variant.entry->kernel, params, stream), variant.symbol);
}

std::vector<LastVariant> last_variants() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<LastVariant> result;
  for (const auto& [family, entry] : last) result.push_back({family, entry.first, *entry.second});
  return result;
}

}  // namespace flash_dist

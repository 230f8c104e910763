#include "native/dispatch.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "names.h"
#include "native/check.h"
#include "native/recording.h"
#include "plans.h"

#define KERNEL_VARIANT(symbol, ...) extern "C" const KERNEL_NAMESPACE::KernelEntry symbol##_entry;
#include "variants.inc"
#undef KERNEL_VARIANT

namespace KERNEL_NAMESPACE {

const std::vector<Variant>& all_variants() {
  static const std::vector<Variant> variants = {
#define KERNEL_VARIANT(symbol, role, family, specific, plan, number, suffix, ptx, ...) \
  {#symbol, Role::role, Family::family, specific != 0,       plan,                     \
   number,  suffix,     ptx != 0,       Values{__VA_ARGS__}, &symbol##_entry},
#include "variants.inc"
#undef KERNEL_VARIANT
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
  if (previous_ >= 0 && cudaSetDevice(previous_) != cudaSuccess) cudaGetLastError();
}

namespace {

bool same_kernel(const Variant& v, const KernelKey& key) {
  return v.role == key.role &&
         std::equal(v.values.begin(), v.values.begin() + WORD_AXES, key.values.begin());
}

// Returns the values of the variants with the role and words of a key, in one family or in all
// families.
std::vector<Values> compiled_sizes(const KernelKey& key, const Family* family = nullptr) {
  std::vector<Values> sizes;
  for (const Variant& v : all_variants()) {
    if (same_kernel(v, key) && (family == nullptr || v.family == *family)) {
      sizes.push_back(v.values);
    }
  }
  return sizes;
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

int smem_limit_asked() {
  const char* text = std::getenv(SMEM_LIMIT_VARIABLE);
  if (text == nullptr || *text == '\0') return INT32_MAX;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value <= 0 || value > INT32_MAX) {
    fail(SMEM_LIMIT_VARIABLE " must be a number of bytes such as 65536, got `", text, "`");
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

// Returns text such as "9.0".
std::string capability_text(const DeviceInfo& info) {
  return std::to_string(info.compute_capability / 10) + "." +
         std::to_string(info.compute_capability % 10);
}

// Tells if a kernel that failed to load can never load in this process: its image is invalid, or
// there is no compiler for it. Such a variant is refused for the rest of the process. Any other
// failure may be temporary (memory, a stream capture, a device in use) or has nothing to do with
// the image (an error of an earlier kernel, the driver): taking the next variant would then change
// the plan and the bits of the result.
//
// The quotes are NVIDIA's descriptions, CUDA Runtime API, "Data types used by CUDA Runtime".
bool is_refusal(cudaError_t status) {
  switch (status) {
    // "The requested device function does not exist or is not compiled for the proper device
    // architecture."
    case cudaErrorInvalidDeviceFunction:
    // "the device kernel image is invalid"
    case cudaErrorInvalidKernelImage:
    // "there is no kernel image available that is suitable for the device"
    case cudaErrorNoKernelImageForDevice:
    // "the device kernel source is invalid"
    case cudaErrorInvalidSource:
    // "A PTX compilation failed."
    case cudaErrorInvalidPtx:
    // "the provided PTX was compiled with an unsupported toolchain", as a rule by a compiler "newer
    // than what is supported by the CUDA driver and PTX JIT compiler"
    case cudaErrorUnsupportedPtxVersion:
    // "the PTX JIT compiler library was not found": a file that the driver lacks
    case cudaErrorJitCompilerNotFound:
    // "the JIT compilation was disabled", by a variable that the driver reads once
    case cudaErrorJitCompilationDisabled:
      return true;
    default:
      return false;
  }
}

bool is_of_capture(cudaError_t status) {
  return cudaErrorStreamCaptureUnsupported <= status && status <= cudaErrorStreamCaptureWrongThread;
}

// Throws an error for a failure that is not a refusal. The failure is not remembered, so the next
// call tries again.
[[noreturn]] void fail_to_load(const Variant& v, const char* call, cudaError_t status) {
  fail(memory_words(status), PRODUCT_NAME " could not load ", v.symbol, ": ", call, " failed with ",
       error_text(status), "\n\nhint: ",
       is_of_capture(status)
           ? "call it once before the capture with arguments of the same kind: a kernel is loaded "
             "when it is first used"
           : "nothing of this is remembered, the next call tries again");
}

// Orders variants from best to worst: exact SASS, SASS of the same major (newest first), PTX
// (newest first), SASS that crosses between discrete and integrated GPUs of a major, which NVIDIA
// does not guarantee to run. For one target, the order is the family made for it, then the largest
// shared-memory plan, then the family that comes first in the table. The rules for suffixes and GPU
// families are not repeated here, because the driver refuses code that does not fit.
struct Preference {
  int device;

  bool possible(const Variant& v) const {
    return v.number <= device && (v.ptx || v.number / 10 == device / 10);
  }
  bool unpromised(const Variant& v) const {
    return !v.ptx && is_integrated(v.number) != is_integrated(device);
  }
  auto rank(const Variant& v) const {
    return std::make_tuple(unpromised(v), v.ptx, -v.number, v.suffix == '\0', !v.specific, -v.plan,
                           v.family);
  }
  bool operator()(const Variant* a, const Variant* b) const { return rank(*a) < rank(*b); }
};

// The variants that may serve one kernel key on one device, best first. Each is loaded on first
// use, because loading may compile PTX.
class Candidates {
 public:
  Candidates(int device, const DeviceInfo& info, const KernelKey& key)
      : device_(device), info_(info) {
    const Preference preference{info.compute_capability};
    for (const Variant& v : all_variants()) {
      if (!is_meant(v, key)) continue;
      if (preference.possible(v)) {
        waiting_.push_back(&v);
      } else {
        refused_.push_back(
            {&v, v.target() + " code cannot run on compute capability " + capability_text(info)});
      }
    }
    std::sort(waiting_.begin(), waiting_.end(), preference);
  }

  // Returns the best variant that loads and supports the arguments, or null. If params is null, any
  // variant that loads is returned.
  const Loaded* find(const void* params) {
    for (size_t i = 0; i < loaded_.size() || load_next(); ++i) {
      const KernelEntry& entry = *loaded_[i].variant->entry;
      if (params == nullptr || entry.refuses == nullptr || !entry.refuses(params)) {
        return &loaded_[i];
      }
    }
    return nullptr;
  }

  // Returns the variants that cannot run on the device or did not load, and the loaded variants
  // that refuse the arguments, each with its reason. Variants that were not tried are missing.
  std::vector<Refusal> refused(const void* params) const {
    std::vector<Refusal> all = refused_;
    for (const Loaded& one : loaded_) {
      const KernelEntry& entry = *one.variant->entry;
      if (params == nullptr || entry.refuses == nullptr) continue;
      if (const char* reason = entry.refuses(params)) all.push_back({one.variant, reason});
    }
    return all;
  }

 private:
  // Loads waiting variants until one succeeds; false if none is left.
  bool load_next() {
    const DeviceScope scope(device_);
    while (next_ < waiting_.size()) {
      const Variant* v = waiting_[next_];
      std::string reason = try_load(*v);
      ++next_;  // not reached if try_load throws: the next call then tries again
      if (reason.empty()) return true;
      refused_.push_back({v, std::move(reason)});
    }
    return false;
  }

  // Returns an empty text if the variant loads on the current device, else the permanent reason why
  // it does not.
  std::string try_load(const Variant& v) {
    if (smem_plan_bytes(v.plan) > info_.smem_limit && v.plan != 0) {
      return "needs up to " + std::to_string(smem_plan_bytes(v.plan)) +
             " bytes of shared memory per block, the limit is " + std::to_string(info_.smem_limit);
    }
    cudaFuncAttributes attributes;
    cudaError_t status = cudaFuncGetAttributes(&attributes, v.entry->kernel);
    if (status != cudaSuccess) {
      cudaGetLastError();
      if (!is_refusal(status)) fail_to_load(v, "cudaFuncGetAttributes", status);
      return error_text(status);
    }
    // The driver's PTX compiler may assign other register counts: warpgroups would then wait for
    // ever for registers that are never released.
    const int registers = v.entry->registers;
    if (registers != 0 && attributes.numRegs != registers) {
      return "has " + std::to_string(attributes.numRegs) +
             " registers for each thread, must have " + std::to_string(registers) +
             " for its warpgroups to share out";
    }
    if (v.entry->dynamic_smem > 48 * 1024) {
      status = cudaFuncSetAttribute(v.entry->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    v.entry->dynamic_smem);
      if (status != cudaSuccess) {
        cudaGetLastError();
        // "not within an acceptable range of values": more than the device allows per block
        const bool too_much = status == cudaErrorInvalidValue;
        if (!too_much && !is_refusal(status)) fail_to_load(v, "cudaFuncSetAttribute", status);
        return error_text(status);
      }
    }
    if (v.entry->cluster > 1) {
      int clusters = 0;
      status = count_clusters(*v.entry, &clusters);
      if (status != cudaSuccess) {
        cudaGetLastError();
        if (!is_refusal(status)) fail_to_load(v, "cudaOccupancyMaxActiveClusters", status);
        return error_text(status);
      }
      if (clusters == 0) {
        return "runs in clusters of " + std::to_string(v.entry->cluster) +
               " blocks, what this process has of the GPU fits none";
      }
    }
    loaded_.push_back({&v, attributes.binaryVersion, attributes.ptxVersion});
    return {};
  }

  // Stores in *clusters how many clusters of a kernel the current device can run at a time.
  static cudaError_t count_clusters(const KernelEntry& entry, int* clusters) {
    cudaLaunchAttribute attribute = in_clusters(entry.cluster);
    const dim3 blocks(static_cast<unsigned>(entry.cluster));
    const auto config = launch_config(entry, blocks, nullptr, attribute);
    return cudaOccupancyMaxActiveClusters(clusters, entry.kernel, &config);
  }

  const int device_;
  const DeviceInfo& info_;
  std::vector<const Variant*> waiting_;
  size_t next_ = 0;  // index of the first variant of waiting_ that was not tried
  std::vector<Loaded> loaded_;
  std::vector<Refusal> refused_;
};

// The properties, candidates and last launches of the devices, shared by all threads.
class Registry {
 public:
  const DeviceInfo& device(int device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return known_device(device);
  }

  // Returns the kernel to run; its variant is null if there is none. Stores the reasons against
  // other variants in *refused, unless refused is null.
  Loaded find(int device, const KernelKey& key, const void* params,
              std::vector<Refusal>* refused = nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Candidates& known = candidates(device, key);
    const Loaded* found = known.find(params);
    if (refused != nullptr) *refused = known.refused(params);
    return found == nullptr ? Loaded{} : *found;
  }

  void remember(int device, const Loaded& kernel) {
    const std::lock_guard<std::mutex> lock(mutex_);
    last_[static_cast<size_t>(kernel.variant->role)] = {device, kernel};
  }

  std::vector<LastVariant> last() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<LastVariant> launched;
    for (const LastVariant& one : last_) {
      if (one.kernel.variant != nullptr) launched.push_back(one);
    }
    return launched;
  }

 private:
  const DeviceInfo& known_device(int device) {
    auto& info = devices_[device];
    if (!info) info = read_device(device);
    return *info;
  }

  Candidates& candidates(int device, const KernelKey& key) {
    auto& found = candidates_[{device, key.role, key.values}];
    if (!found) found = std::make_unique<Candidates>(device, known_device(device), key);
    return *found;
  }

  std::mutex mutex_;
  std::map<int, std::unique_ptr<DeviceInfo>> devices_;
  std::map<std::tuple<int, Role, Values>, std::unique_ptr<Candidates>> candidates_;
  std::array<LastVariant, ROLE_COUNT> last_{};
};

Registry& registry() {
  static Registry* const one = new Registry;  // never destroyed: threads may use it during exit
  return *one;
}

// Returns text such as "head_dim 192, head_dim_v 128". A size equal to that of its default axis is
// omitted.
std::string describe_sizes(const Values& values) {
  std::string text;
  for (int axis = WORD_AXES; axis < KEY_AXES; ++axis) {
    const int other = DEFAULT_AXES[axis];
    if (other >= 0 && values[axis] == values[other]) continue;
    text += (text.empty() ? "" : ", ") + std::string(AXIS_NAMES[axis]) + " " +
            std::to_string(values[axis]);
  }
  return text;
}

// Returns text such as "bf16 nhwc".
std::string describe_words(const Values& values) {
  std::string text;
  for (int axis = 0; axis < WORD_AXES; ++axis) {
    text += (axis == 0 ? "" : " ") + std::string(word_name(axis, values[axis]));
  }
  return text;
}

// Lists up to four combinations of words for which the role has kernels, the nearest to the key
// first, and counts the other combinations.
void list_words(std::ostream& text, const KernelKey& key) {
  constexpr size_t MOST = 4;
  std::vector<Values> compiled;
  for (const Variant& v : all_variants()) {
    if (v.role == key.role) compiled.push_back(v.values);
  }
  const std::vector<Values> nearest = nearest_words(compiled, key.values);
  for (size_t i = 0; i < nearest.size() && i < MOST; ++i) {
    text << (i == 0 ? ", only for " : "; ") << describe_words(nearest[i]);
  }
  if (nearest.size() > MOST) text << "; " << nearest.size() - MOST << " more";
}

void list_sizes(std::ostream& text, const KernelKey& key) {
  std::set<Values> sizes;
  for (const Values& one : compiled_sizes(key)) sizes.insert(one);
  text << ": none is built in";
  if (sizes.empty()) return list_words(text, key);
  const char* separator = ", only for ";
  for (const Values& one : sizes) {
    text << separator << describe_sizes(one);
    separator = "; ";
  }
}

// Throws if the index of a word is not valid for its axis.
void check_words(const Values& values) {
  for (int axis = 0; axis < WORD_AXES; ++axis) {
    const int number = values[axis];
    if (0 <= number && number < word_count(axis)) continue;
    std::string allowed;
    for (int one = 0; one < word_count(axis); ++one) {
      allowed += one == 0 ? "" : one + 1 == word_count(axis) ? " or " : ", ";
      allowed += std::to_string(one) + " (" + word_name(axis, one) + ")";
    }
    fail(AXIS_NAMES[axis], " must be ", allowed, ", got ", number);
  }
}

[[noreturn]] void refuse(int device, const KernelKey& key, const std::vector<Refusal>& refused) {
  check_words(key.values);
  const DeviceInfo& info = device_info(device);
  std::ostringstream text;
  text << "no variant of kernel " << role_name(key.role) << " for" << (WORD_AXES > 0 ? " " : "")
       << describe_words(key.values);
  text << (WORD_AXES > 0 && WORD_AXES < KEY_AXES ? ", " : " ") << describe_sizes(key.values);
  text << " runs on GPU " << device << " (" << info.name << ", compute capability "
       << capability_text(info) << ")";
  const char* separator = ": ";
  for (const Refusal& refusal : refused) {
    text << separator << refusal.variant->symbol << ": " << refusal.reason;
    separator = "; ";
  }
  if (refused.empty()) list_sizes(text, key);
  text << "\n\nhint: " << (is_built_in(key) ? "" : "pass a combination that is built in; ")
       << "`" PRODUCT_PROGRAM
          " doctor` says what this build has for the GPU, and which arch set has more";
  throw Error(text.str());
}

}  // namespace

bool is_meant(const Variant& variant, const KernelKey& key) {
  if (!same_kernel(variant, key)) return false;
  if constexpr (WORD_AXES == KEY_AXES) return true;
  const Values meant = smallest_holding(compiled_sizes(key, &variant.family), key.values);
  const bool half_filled = 2 * key.values[WORD_AXES] <= meant[WORD_AXES];
  if (half_filled && leaves_half_filled(variant.family)) return false;
  return variant.values == meant;
}

bool is_built_in(const KernelKey& key) {
  const auto& all = all_variants();
  return std::any_of(all.begin(), all.end(), [&](const Variant& v) { return same_kernel(v, key); });
}

const DeviceInfo& device_info(int device) { return registry().device(device); }

Selection select_kernel(int device, const KernelKey& key) {
  Selection selection;
  selection.chosen = registry().find(device, key, nullptr, &selection.refused);
  return selection;
}

Loaded find_kernel(int device, const KernelKey& key, const void* params) {
  return registry().find(device, key, params);
}

Loaded require_kernel(int device, const KernelKey& key, const void* params) {
  const Loaded found = registry().find(device, key, params);
  if (found.variant != nullptr) return found;
  std::vector<Refusal> refused;
  registry().find(device, key, params, &refused);
  refuse(device, key, refused);
}

void launch(int device, const Loaded& kernel, const void* params, cudaStream_t stream) {
  const Variant& variant = *kernel.variant;
  const cudaError_t status = variant.entry->launch(*variant.entry, params, stream);
  if (status == cudaErrorInvalidConfiguration) {  // from launch_1d(): the grid is too large
    cudaGetLastError();
    fail(variant.symbol, " failed with ", error_text(status), ": it would need more than ",
         INT32_MAX, " blocks\n\nhint: pass less at a time, such as fewer batch entries");
  }
  check_cuda(status, variant.symbol);
  registry().remember(device, kernel);
  record_launch(variant.symbol);
}

std::vector<LastVariant> last_variants() { return registry().last(); }

}  // namespace KERNEL_NAMESPACE

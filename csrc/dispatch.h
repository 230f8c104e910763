// The compiled variants, and the choice among them by what really loads on a device.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "core/entry.h"

namespace flash_dist {

// One line of the generated table.
struct Variant {
  const char* symbol;
  const char* family;
  const char* dtype;
  int head_dim;    // columns of q and k (of the one tensor, for kernels that know one)
  int head_dim_v;  // columns of v and out
  int plan;        // KB of shared memory, see kernels.toml
  int number;      // 90
  char suffix;     // 'a', 'f' or '\0'
  bool ptx;
  const KernelEntry* entry;

  std::string target() const;  // "sm_90a" or "compute_80"
};

const std::vector<Variant>& all_variants();

// A kernel as the algorithm names it, with the columns that exist: the smallest compiled size that
// holds them is meant. family and dtype are string literals.
struct KernelKey {
  const char* family;
  const char* dtype;
  int head_dim;
  int head_dim_v;
};

// Whether a variant is of that smallest size.
bool is_meant(const Variant& variant, const KernelKey& key);

struct Refusal {
  const Variant* variant;
  std::string reason;
};

// What a device will run for one kernel, and why not the variants before it.
struct Selection {
  const Variant* chosen = nullptr;
  int binary_version = 0;  // what the driver loaded: 90
  int ptx_version = 0;     // the PTX it was made from: 80
  std::vector<Refusal> refused;
};

struct DeviceInfo {
  std::string name;
  int compute_capability;  // 90
  int sm_count;
  int smem_limit;  // bytes a block may ask for, lowered by FLASH_DIST_SMEM_LIMIT
  int l2_bytes;
};

// Both are asked once per process and device; the current device is left as it was.
const DeviceInfo& device_info(int device);
const Selection& select_kernel(int device, const KernelKey& key);

// As select_kernel, or an error that names the device, what is built in and why each variant was
// refused.
const Variant& require_kernel(int device, const KernelKey& key);

// Launches on stream and remembers the variant for last_variants().
void launch(int device, const KernelKey& key, const void* params, cudaStream_t stream);

struct LastVariant {
  std::string family;
  int device;
  Selection selection;
};
std::vector<LastVariant> last_variants();

// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace flash_dist

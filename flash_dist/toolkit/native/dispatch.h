// The compiled variants, and the choice of the best variant that loads on a device.
//
// A role is the task of a kernel, a family is one implementation of a role. Several families may
// serve a role: on each target the specific family is tried first. The general family follows if
// the specific one is not built, does not load, refuses the arguments, or leaves half-filled calls
// to it (is_meant). Axes tell the kernels of a role apart; the package declares them.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "native/entry.h"
#include "native/values.h"

namespace KERNEL_NAMESPACE {

// A compiled kernel variant: one line of the generated variants.inc.
struct Variant {
  const char* symbol;
  Role role;
  Family family;
  bool specific;  // the family is for some targets only
  int plan;       // KB of shared memory; 0 needs no opt-in
  int number;     // number of the target, such as 90
  char suffix;    // 'a', 'f' or '\0'
  bool ptx;
  Values values;
  const KernelEntry* entry;

  std::string target() const;  // "sm_90a" or "compute_80"
};

const std::vector<Variant>& all_variants();

// The kernel that a call requests, by its role and the values of the call. In each family the key
// selects the smallest compiled sizes that are not below the sizes of the call.
struct KernelKey {
  Role role;
  Values values;
};

// True if a variant has the role and words of the key, and the smallest sizes of its family that
// hold the key's. Some families leave calls that would fill at most half of the first size to the
// general family (leaves_half_filled in the table of kernels). targets/verdict.py predicts this.
bool is_meant(const Variant& variant, const KernelKey& key);

// True if any variant, for whatever device, has the role and the words of a key.
bool is_built_in(const KernelKey& key);

// A variant that the driver has loaded on some device.
struct Loaded {
  const Variant* variant = nullptr;
  int binary_version = 0;  // compute capability of the loaded SASS, times 10: 90
  int ptx_version = 0;     // target of the PTX that the SASS was made from, times 10: 80
};

struct Refusal {
  const Variant* variant;
  std::string reason;
};

// The variant that a device will run, and why other variants were refused.
struct Selection {
  Loaded chosen;  // variant is null if there is none
  std::vector<Refusal> refused;
};

struct DeviceInfo {
  std::string name;
  int compute_capability;  // such as 90
  int sm_count;
  int smem_limit;  // bytes available to a block, lowered by SMEM_LIMIT_VARIABLE
  int l2_bytes;
};

// device_info() queries the driver once per device, and select_kernel() tries each variant at most
// once per device. Both restore the current device. Only a permanent reason is remembered as a
// refusal: any other failure is an error, and the next call tries again.
const DeviceInfo& device_info(int device);
Selection select_kernel(int device, const KernelKey& key);

// Returns the best variant that loads and supports these arguments. If params is null, any variant
// that loads is returned. If there is none, throws an error that names the device, the built
// variants and the reason against each.
Loaded require_kernel(int device, const KernelKey& key, const void* params);

// Like require_kernel, but if there is no such variant, Loaded::variant is null.
Loaded find_kernel(int device, const KernelKey& key, const void* params);

// Launches on stream and remembers the variant for last_variants().
void launch(int device, const Loaded& kernel, const void* params, cudaStream_t stream);

struct LastVariant {
  int device;
  Loaded kernel;
};
std::vector<LastVariant> last_variants();  // one entry for each role that was launched

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

}  // namespace KERNEL_NAMESPACE

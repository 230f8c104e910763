// The compiled variants, and the choice among them by what really loads on a device.
//
// A role is what a kernel is for (fwd, bwd_dkdv, ...), a family is one way to do it. Several
// families may serve a role: on each target the more specific one is tried first, and the general
// one is what remains where that one is not built in, does not load, or refuses the arguments.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "core/entry.h"
#include "core/params.h"
#include "host/plan.h"
#include "roles.h"

namespace flash_dist {

// One line of the generated table.
struct Variant {
  const char* symbol;
  Role role;
  Family family;
  bool specific;  // of a family that is for some targets only
  Dtype dtype;
  KernelSize size;  // columns of q and k, of v and out (twice those of the one tensor of others)
  int plan;         // KB of shared memory, see kernels.toml
  int number;       // 90
  char suffix;      // 'a', 'f' or '\0'
  bool ptx;
  const KernelEntry* entry;

  std::string target() const;  // "sm_90a" or "compute_80"
};

const std::vector<Variant>& all_variants();

const char* dtype_name(Dtype dtype);

// A kernel as the algorithm names it, with the columns that exist: of each family the smallest
// compiled size that holds them is meant.
struct KernelKey {
  Role role;
  Dtype dtype;
  KernelSize columns;
};

// True if a variant is of that smallest size of its family. Some families leave calls that would
// fill half of its columns, or less, to the general one (leaves_half_filled in kernels.toml).
// flash_dist/toolkit/targets/verdict.py predicts the same.
bool is_meant(const Variant& variant, const KernelKey& key);

// Whether any variant serves a role for a dtype, on whatever device.
bool is_built_in(Role role, Dtype dtype);

// A variant that the driver has loaded on some device.
struct Loaded {
  const Variant* variant = nullptr;
  int binary_version = 0;  // what the driver loaded: 90
  int ptx_version = 0;     // the PTX it was made from: 80
};

struct Refusal {
  const Variant* variant;
  std::string reason;
};

// What a device will run for one kernel, and why not the variants before it.
struct Selection {
  Loaded chosen;  // variant null: none
  std::vector<Refusal> refused;
};

struct DeviceInfo {
  std::string name;
  int compute_capability;  // 90
  int sm_count;
  int smem_limit;  // bytes a block may ask for, lowered by FLASH_DIST_SMEM_LIMIT
  int l2_bytes;
};

// Both are asked once per process and device; the current device is left as it was. Only what means
// that a variant cannot run there is remembered as a refusal: any other failure is an error, and the
// next call asks again.
const DeviceInfo& device_info(int device);
Selection select_kernel(int device, const KernelKey& key);

// The best variant that loads and takes these arguments (null: any), or an error that names the
// device, what is built in and why each variant was refused.
Loaded require_kernel(int device, const KernelKey& key, const void* params);

// The same, with variant null where there is none.
Loaded find_kernel(int device, const KernelKey& key, const void* params);

// Launches on stream and remembers the variant for last_variants().
void launch(int device, const Loaded& kernel, const void* params, cudaStream_t stream);

struct LastVariant {
  int device;
  Loaded kernel;
};
std::vector<LastVariant> last_variants();  // one for each role that was launched

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

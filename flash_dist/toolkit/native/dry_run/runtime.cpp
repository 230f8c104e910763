// The CUDA runtime of a dry run: one device, described by environment variables, on which every
// kernel loads.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "native/entry.h"

namespace {

int read_number(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::atoi(text);
}

}  // namespace

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  const int number = read_number("DRY_RUN_CAPABILITY");
  std::snprintf(properties->name, sizeof properties->name, "a dry run's");
  properties->major = number / 10;
  properties->minor = number % 10;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      *value = read_number("DRY_RUN_SM_COUNT");
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = read_number("DRY_RUN_SMEM_LIMIT");
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 50 << 20;  // L2 size: affects the order of blocks, not the plan
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

// In a dry run, the pointer to a kernel points to its KernelEntry; see ci/dry_run/build.py.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  *attributes = {static_cast<const KERNEL_NAMESPACE::KernelEntry*>(kernel)->registers, 0, 0};
  return cudaSuccess;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

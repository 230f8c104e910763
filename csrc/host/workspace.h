// The device memory of one call, which the caller allocates.
#pragma once

#include <cstdint>

#include "host/capi.h"
#include "native/check.h"

namespace flash_dist {

constexpr int64_t ALIGNMENT = 256;  // bytes, of memory that is given and of its parts

inline int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// So many bytes, null for none; an error if there are not as many.
inline void* require_workspace(const Call& call, int64_t bytes, Allocate allocate, void* context) {
  if (bytes == 0) return nullptr;
  void* workspace = allocate(context, bytes);
  if (workspace == nullptr) {
    fail("CUDA out of memory. flash_dist could not allocate ", bytes, " bytes of workspace on GPU ",
         call.device, "\n\nhint: free memory, or set FLASH_DIST_WORKSPACE_MB to a lower limit");
  }
  return workspace;
}

}  // namespace flash_dist

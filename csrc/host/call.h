// Makes the KernelKey of a call's kernels, reads the workspace budget, and allocates workspace.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "core/params.h"
#include "host/capi.h"
#include "host/plan.h"
#include "native/check.h"
#include "native/dispatch.h"

namespace flash_dist {

static_assert(static_cast<int>(Dtype::FP16) == DTYPE_FP16);
static_assert(static_cast<int>(Dtype::BF16) == DTYPE_BF16);
static_assert(static_cast<int>(Dtype::FP32) == DTYPE_FP32);
static_assert(static_cast<int>(Dtype::IEEE32) == DTYPE_IEEE32);

inline KernelKey make_key(Role role, Dtype dtype, const KernelSize& columns) {
  return {role, {static_cast<int>(dtype), columns.head_dim, columns.head_dim_v}};
}

// Returns the columns for which the variant is compiled: those of q and k, and those of v and out.
// Kernels that use tensors of only one of these widths have it in both fields.
inline KernelSize size_of(const Variant& v) {
  return {v.values[HEAD_DIM_AXIS], v.values[HEAD_DIM_V_AXIS]};
}

constexpr int64_t BUDGET_NOW = -1;
constexpr int64_t DEFAULT_BUDGET_MB = 1536;  // same value in flash_dist/kernels/budget.py

// Returns the budget in bytes. For BUDGET_NOW, reads FLASH_DIST_WORKSPACE_MB. Compiled graphs,
// which store their arguments, pass BUDGET_NOW; for eager calls flash_dist/kernels/budget.py reads
// the variable.
inline int64_t read_budget(int64_t budget) {
  if (budget >= 0) return budget;
  if (budget != BUDGET_NOW) {
    fail("budget must be at least 0 bytes, or -1 for FLASH_DIST_WORKSPACE_MB, got ", budget);
  }
  const char* text = std::getenv("FLASH_DIST_WORKSPACE_MB");
  if (text == nullptr || *text == '\0') return DEFAULT_BUDGET_MB << 20;
  int64_t megabytes = 0;
  for (const char* c = text; *c != '\0'; ++c) {
    if (*c < '0' || *c > '9') {
      fail("FLASH_DIST_WORKSPACE_MB must be a whole number of MiB, got `", text,
           "`\n\nhint: unset it for the default of ", DEFAULT_BUDGET_MB);
    }
    megabytes = 10 * megabytes + (*c - '0');
    if (megabytes > INT64_MAX >> 20) {
      fail("FLASH_DIST_WORKSPACE_MB must be at most ", INT64_MAX >> 20, " MiB, got `", text,
           "`\n\nhint: unset it for the default of ", DEFAULT_BUDGET_MB);
    }
  }
  return megabytes << 20;
}

constexpr int64_t ALIGNMENT = 256;  // bytes; the workspace and its parts start at multiples of it

inline int64_t aligned(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// Allocates `bytes` bytes. Returns null for 0 bytes. Fails if memory is exhausted.
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

// How many bytes the workspace of a call may take.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "native/check.h"

namespace flash_dist {

constexpr int64_t BUDGET_NOW = -1;
constexpr int64_t DEFAULT_BUDGET_MB = 1536;  // flash_dist/kernels/budget.py has the same

// The bytes of a budget. A compiled graph keeps its numbers for good and gives BUDGET_NOW: then the
// variable is read here, as flash_dist/kernels/budget.py reads it for all others.
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

}  // namespace flash_dist

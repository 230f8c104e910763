// The GPU that a kernel is compiled for. Every kernel template and every host template that
// launches it takes a Target, so that two targets of one kernel never share a symbol that the
// linker could merge.
#pragma once
#include <cstdint>
#include "product.h"

namespace KERNEL_NAMESPACE {

enum class Code { SASS, PTX };

template <int NUMBER_, char SUFFIX_, Code CODE_>
struct Target {
  static constexpr int NUMBER = NUMBER_;   // 75, 80, 86, 89, 90, 100, 120, ...
  static constexpr char SUFFIX = SUFFIX_;  // '\0', 'a' (this chip only) or 'f' (this family)
  static constexpr Code CODE = CODE_;

  static constexpr bool HAS_CP_ASYNC = NUMBER >= 80;  // else tiles are staged through registers
  static constexpr bool HAS_MMA_K16 = NUMBER >= 80;   // else pairs of m16n8k8, fp16 only
  static constexpr bool HAS_PACKED_CONVERT = NUMBER >= 80;
};

}  // namespace KERNEL_NAMESPACE

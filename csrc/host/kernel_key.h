// The kernels of attention: a role for a dtype and columns.
#pragma once

#include "core/params.h"
#include "host/plan.h"
#include "native/dispatch.h"

namespace flash_dist {

static_assert(static_cast<int>(Dtype::FP16) == DTYPE_FP16);
static_assert(static_cast<int>(Dtype::BF16) == DTYPE_BF16);
static_assert(static_cast<int>(Dtype::FP32) == DTYPE_FP32);
static_assert(static_cast<int>(Dtype::IEEE32) == DTYPE_IEEE32);

inline KernelKey make_key(Role role, Dtype dtype, const KernelSize& columns) {
  return {role, {static_cast<int>(dtype), columns.head_dim, columns.head_dim_v}};
}

// Columns of q and k, of v and out (twice those of the one tensor of others).
inline KernelSize size_of(const Variant& v) {
  return {v.values[HEAD_DIM_AXIS], v.values[HEAD_DIM_V_AXIS]};
}

}  // namespace flash_dist

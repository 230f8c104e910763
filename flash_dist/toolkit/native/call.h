// Context of a call of the C interface, in addition to its arguments.
#pragma once

#include <cstdint>

#include "product.h"

namespace KERNEL_NAMESPACE {

struct Call {
  int device;
  void* stream;  // cudaStream_t
  int dtype;     // index of a word of the dtype axis, as in roles.h
};

// Function that allocates memory of the current device for the kernels of one call, aligned to 256
// bytes, or returns null. The memory may be freed in stream order after the call has returned.
using Allocate = void* (*)(void* context, int64_t bytes);

}  // namespace KERNEL_NAMESPACE

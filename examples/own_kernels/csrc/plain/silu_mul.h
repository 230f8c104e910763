// A kernel without the dispatcher: one function that launches it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace own_kernels {

enum class Element { FP16, BF16, FP32 };

// out = a / (1 + exp(-a)) * b, of `count` elements each, on the current device.
cudaError_t silu_mul(const void* a, const void* b, void* out, int64_t count, Element element,
                     cudaStream_t stream);

}  // namespace own_kernels

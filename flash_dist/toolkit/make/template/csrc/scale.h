#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// out[i] = x[i] * factor
cudaError_t scale(const float* x, float* out, int64_t count, float factor, cudaStream_t stream);

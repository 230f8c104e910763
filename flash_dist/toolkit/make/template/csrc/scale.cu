#include "scale.h"

namespace {

constexpr int THREADS = 256;

// A block owns THREADS consecutive elements.
__global__ void __launch_bounds__(THREADS)
    scale_kernel(const float* x, float* out, int64_t count, float factor) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i < count) out[i] = x[i] * factor;
}

}  // namespace

cudaError_t scale(const float* x, float* out, int64_t count, float factor, cudaStream_t stream) {
  const int64_t blocks = (count + THREADS - 1) / THREADS;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  scale_kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(x, out, count, factor);
  return cudaGetLastError();
}

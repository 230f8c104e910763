// SiLU of one tensor times another: out = a / (1 + exp(-a)) * b, computed in fp32.
//
// Grid      one thread per vector of 16 bytes.
#include "plain/silu_mul.h"

#include "vector.cuh"

namespace own_kernels {

namespace {

constexpr int THREADS = 256;

template <class T>
__device__ __forceinline__ T silu_mul_one(T a, T b) {
  const float x = static_cast<float>(a);
  return static_cast<T>(x / (1.0f + expf(-x)) * static_cast<float>(b));
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    silu_mul_kernel(const T* a, const T* b, T* out, int64_t count, bool aligned) {
  constexpr int WIDTH = Vector<T>::WIDTH;
  const int64_t first = (int64_t{blockIdx.x} * THREADS + threadIdx.x) * WIDTH;
  if (aligned && first + WIDTH <= count) {
    Vector<T> x = load_vector(a + first);
    const Vector<T> y = load_vector(b + first);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) x.elements[i] = silu_mul_one(x.elements[i], y.elements[i]);
    store_vector(out + first, x);
  } else {
    for (int64_t i = first; i < first + WIDTH && i < count; ++i) out[i] = silu_mul_one(a[i], b[i]);
  }
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <class T>
cudaError_t launch(const void* a, const void* b, void* out, int64_t count, cudaStream_t stream) {
  constexpr int64_t EACH = THREADS * Vector<T>::WIDTH;  // elements of a block
  const int64_t blocks = (count + EACH - 1) / EACH;
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  silu_mul_kernel<<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(
      static_cast<const T*>(a), static_cast<const T*>(b), static_cast<T*>(out), count,
      is_aligned(a) && is_aligned(b) && is_aligned(out));
  return cudaGetLastError();
}

}  // namespace

cudaError_t silu_mul(const void* a, const void* b, void* out, int64_t count, Element element,
                     cudaStream_t stream) {
  switch (element) {
    case Element::FP16:
      return launch<__half>(a, b, out, count, stream);
    case Element::BF16:
      return launch<__nv_bfloat16>(a, b, out, count, stream);
    case Element::FP32:
      return launch<float>(a, b, out, count, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace own_kernels

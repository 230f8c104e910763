// 16 bytes of a tensor, which a thread loads or stores with one instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace own_kernels {

template <class T>
struct alignas(16) Vector {
  static constexpr int WIDTH = 16 / sizeof(T);
  T elements[WIDTH];
};

template <class T>
__device__ __forceinline__ Vector<T> load_vector(const T* address) {
  Vector<T> vector;
  *reinterpret_cast<uint4*>(&vector) = *reinterpret_cast<const uint4*>(address);
  return vector;
}

template <class T>
__device__ __forceinline__ void store_vector(T* address, const Vector<T>& vector) {
  *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(&vector);
}

}  // namespace own_kernels

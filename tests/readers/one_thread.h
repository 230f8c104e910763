// The part of CUDA that csrc's device code uses, for one host thread. C++ without a GPU can then
// call the functions that find a block's work. Include this file before those functions.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using std::max;
using std::min;

inline uint3 threadIdx{}, blockIdx{};

inline void __syncthreads() {}
inline void __syncwarp() {}
template <class T>
T __shfl_up_sync(unsigned, T x, int) {
  return x;
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int) {
  return x;
}
template <class T>
T __shfl_sync(unsigned, T x, int) {
  return x;
}
inline unsigned __ballot_sync(unsigned, bool x) { return x; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
template <class T>
T atomicAdd(T* at, T x) {
  *at += x;
  return *at - x;
}

inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t{a} * b >> 32; }
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

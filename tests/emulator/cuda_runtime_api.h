// What the kernels and their launches take of CUDA, for a C++ compiler without it: a launch runs the
// blocks of a grid one after the other, block.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

struct int2 {
  int x, y;
};
struct int4 {
  int x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration, cudaErrorMemoryAllocation };
inline const char* cudaGetErrorName(cudaError_t) { return "an error"; }
inline const char* cudaGetErrorString(cudaError_t) { return "of the emulator"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

using cudaStream_t = struct CUstream_st*;
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                             size_t smem, cudaStream_t stream);
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** arguments) {
  return cudaLaunchKernel(kernel, config->gridDim, config->blockDim, arguments,
                          config->dynamicSmemBytes, config->stream);
}

#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

extern uint3 threadIdx, blockIdx;
extern dim3 gridDim, blockDim;

using std::max;
using std::min;
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}

#include "block.h"

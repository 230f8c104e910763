// CUDA's types and keywords for a C++ compiler without CUDA: for dry runs and tests/emulator.
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

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorInvalidConfiguration,
  cudaErrorInvalidDeviceFunction,
  cudaErrorInvalidKernelImage,
  cudaErrorNoKernelImageForDevice,
  cudaErrorInvalidSource,
  cudaErrorInvalidPtx,
  cudaErrorUnsupportedPtxVersion,
  cudaErrorJitCompilerNotFound,
  cudaErrorJitCompilationDisabled,
  cudaErrorStreamCaptureUnsupported,
  cudaErrorStreamCaptureWrongThread,
  cudaErrorNotSupported,
};
inline const char* cudaGetErrorName(cudaError_t) { return "an error"; }
inline const char* cudaGetErrorString(cudaError_t) { return "without CUDA"; }
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

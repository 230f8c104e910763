// What csrc/ takes of CUDA, for a C++ compiler without it: the host code compiles, and kernels as far
// as nobody launches them. runtime.cpp has the functions of the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#define CUDART_VERSION 13000

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

// --- The host ---------------------------------------------------------------------------------

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
inline const char* cudaGetErrorString(cudaError_t) { return "of a dry run"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

using cudaStream_t = struct CUstream_st*;
inline cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

// The device of a tensor on the CPU is -1, for torch and here.
inline cudaError_t cudaGetDevice(int* device) {
  *device = -1;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
struct cudaDeviceProp {
  char name[256];
  int major, minor;
};
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);

struct cudaFuncAttributes {
  int numRegs, binaryVersion, ptxVersion;
};
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

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
inline cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*,
                                                  const cudaLaunchConfig_t*) {
  *clusters = 1;
  return cudaSuccess;
}
inline cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) {
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned flags,
                                             cudaDriverEntryPointQueryResult* result);

// --- Kernels, which nobody runs -------------------------------------------------------------------

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
size_t __cvta_generic_to_shared(const void*);
template <class T>
T __shfl_sync(unsigned, T, int, int = 32);
template <class T>
T __shfl_xor_sync(unsigned, T, int, int = 32);
template <class T>
T __shfl_up_sync(unsigned, T, int, int = 32);
int __all_sync(unsigned, int);
unsigned __ballot_sync(unsigned, int);
void __syncwarp(unsigned = ~0u);
unsigned __float_as_uint(float);
float __uint_as_float(unsigned);
unsigned __umulhi(unsigned, unsigned);
float __fadd_rn(float, float);
float __fsub_rn(float, float);
float __fmul_rn(float, float);
float __fdiv_rn(float, float);
float __fmaf_rn(float, float, float);

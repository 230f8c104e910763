// The part of CUDA that host code and kernels use, for a C++ compiler without CUDA. Host code
// compiles and runs; kernels compile, but never run. runtime.cpp defines the host functions that
// are only declared here.
#pragma once

#include "cuda_types.h"

#define CUDART_VERSION 13000

// --- Host functions ---------------------------------------------------------------------------

inline cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }

// Stores -1, torch's index of the CPU: the tensors of a dry run are on the CPU.
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

// --- Kernels, which never run -----------------------------------------------------------------

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

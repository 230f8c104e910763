// KernelEntry describes one compiled kernel variant to the dispatcher. The generator writes a
// translation unit for each group of variants, which defines each kernel and its KernelEntry, named
// after the kernel:
//
//   using Config = NormConfig<Target<90, 'a', Code::SASS>, Bf16, 64>;
//   extern "C" __global__ void __launch_bounds__(Config::THREADS, Config::MIN_BLOCKS)
//   my_norms_rms_bf16_d64_sm90a(const __grid_constant__ NormParams params) {
//     norm_block<Config>(params);
//   }
//   extern "C" const KernelEntry my_norms_rms_bf16_d64_sm90a_entry =
//       make_entry<Config>(&my_norms_rms_bf16_d64_sm90a, launch_norm<Config>);
//
// Config::THREADS, SMEM_BYTES and MIN_BLOCKS are required. The functions below read further members
// where a Config has them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "product.h"

namespace KERNEL_NAMESPACE {

struct KernelEntry {
  const void* kernel;  // argument of cudaFuncGetAttributes and cudaLaunchKernel
  cudaError_t (*launch)(const KernelEntry& entry, const void* params, cudaStream_t stream);
  int threads;
  int dynamic_smem;    // bytes
  int block_rows;      // rows of the result that a block or cluster owns; 0: it owns no rows
  int blocks_per_sm;   // resident blocks per multiprocessor that the tile was chosen for
  int cluster;         // blocks per cluster; 1: no clusters
  bool takes_tickets;  // blocks take tiles from a counter in memory
  // Returns the reason why the kernel does not support these arguments, or null if it does. After a
  // refusal the dispatcher takes the next family of the role. The pointer is null if the kernel
  // supports all arguments.
  const char* (*refuses)(const void* params);
  int registers;  // per thread at launch, which setmaxnreg redistributes; 0: any number
};

// The most registers per thread that any kernel requests with setmaxnreg, a multiple of 8.
constexpr int MOST_REGISTERS = 240;

// Registers per thread at launch if a multiprocessor is to hold this many threads. ptxas compiles a
// kernel with setmaxnreg for exactly this number of registers.
constexpr int registers_at_launch(int threads) {
  const int each = 65536 / threads / 8 * 8;
  return each < MOST_REGISTERS ? each : MOST_REGISTERS;
}

// Returns KernelEntry::registers of a Config whose warpgroups redistribute registers; 0 for other
// kernels.
template <class Config>
constexpr auto registers_of(int) -> decltype(Config::CONSUMER_REGISTERS) {
  return registers_at_launch(Config::THREADS * Config::MIN_BLOCKS);
}
template <class Config>
constexpr int registers_of(...) {
  return 0;
}

// Returns Config::TAKES_TICKETS if Config has it, else false.
template <class Config>
constexpr auto takes_tickets(int) -> decltype(Config::TAKES_TICKETS) {
  return Config::TAKES_TICKETS;
}
template <class Config>
constexpr bool takes_tickets(...) {
  return false;
}

// Returns Config::CLUSTER if Config has it, else 1.
template <class Config>
constexpr auto cluster_of(int) -> decltype(Config::CLUSTER) {
  return Config::CLUSTER;
}
template <class Config>
constexpr int cluster_of(...) {
  return 1;
}

// Returns Config::BLOCK_ROWS if Config has it, else 0.
template <class Config>
constexpr auto block_rows_of(int) -> decltype(Config::BLOCK_ROWS) {
  return Config::BLOCK_ROWS;
}
template <class Config>
constexpr int block_rows_of(...) {
  return 0;
}

template <class Config, class Params>
KernelEntry make_entry(void (*kernel)(Params),
                       cudaError_t (*launch)(const KernelEntry&, const void*, cudaStream_t),
                       const char* (*refuses)(const void*) = nullptr) {
  return {reinterpret_cast<const void*>(kernel),
          launch,
          Config::THREADS,
          Config::SMEM_BYTES,
          block_rows_of<Config>(0),
          Config::MIN_BLOCKS,
          cluster_of<Config>(0),
          takes_tickets<Config>(0),
          refuses,
          registers_of<Config>(0)};
}

// Returns the configuration of a launch with one attribute. The attribute must outlive the launch.
inline cudaLaunchConfig_t launch_config(const KernelEntry& entry, dim3 blocks, cudaStream_t stream,
                                        cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(entry.threads));
  config.dynamicSmemBytes = static_cast<size_t>(entry.dynamic_smem);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

inline cudaLaunchAttribute in_clusters(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// Launches a grid of blocks without attributes.
inline cudaError_t launch_plain(const KernelEntry& entry, const void* params, dim3 blocks,
                                cudaStream_t stream) {
  void* arguments[] = {const_cast<void*>(params)};
  return cudaLaunchKernel(entry.kernel, blocks, dim3(static_cast<unsigned>(entry.threads)),
                          arguments, static_cast<size_t>(entry.dynamic_smem), stream);
}

// Launches a grid of blocks with one attribute.
inline cudaError_t launch_with(cudaLaunchAttribute attribute, const KernelEntry& entry,
                               const void* params, dim3 blocks, cudaStream_t stream) {
  void* arguments[] = {const_cast<void*>(params)};
  const auto config = launch_config(entry, blocks, stream, attribute);
  return cudaLaunchKernelExC(&config, entry.kernel, arguments);
}

// Launches `blocks` blocks, or as many clusters if entry.cluster exceeds 1; nothing for 0. Returns
// cudaErrorInvalidConfiguration if the grid would exceed its limit.
inline cudaError_t launch_1d(const KernelEntry& entry, const void* params, int64_t blocks,
                             cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX / entry.cluster) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks * entry.cluster));
  if (entry.cluster == 1) return launch_plain(entry, params, grid, stream);
  return launch_with(in_clusters(entry.cluster), entry, params, grid, stream);
}

}  // namespace KERNEL_NAMESPACE

// One compiled kernel variant as the dispatcher sees it. Each variant's translation unit defines
// the kernel and one such object, named after the kernel:
//
//   using Config = FwdConfig<Target<90, 'a', Code::SASS>, Bf16, 64, 64, 64>;
//   extern "C" __global__ void __launch_bounds__(Config::THREADS, Config::MIN_BLOCKS)
//   flash_dist_fwd_bf16_d64_smem64_sm90a(const __grid_constant__ FwdParams params) {
//     fwd_block<Config>(params);
//   }
//   extern "C" const KernelEntry flash_dist_fwd_bf16_d64_smem64_sm90a_entry =
//       make_entry<Config>(&flash_dist_fwd_bf16_d64_smem64_sm90a, &launch_fwd<Config>);
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flash_dist {

struct KernelEntry {
  const void* kernel;  // what cudaFuncGetAttributes and cudaLaunchKernel take
  cudaError_t (*launch)(const void* kernel, const void* params, cudaStream_t stream);
  int threads;
  int dynamic_smem;    // bytes
  int block_rows;      // query rows (fwd, dq) or key rows (dkdv) that a block owns
  int blocks_per_sm;   // resident blocks the tile was chosen for
  int cluster;         // blocks that share these rows
  bool takes_tickets;  // blocks share out tiles that differ in length by counting in memory
  // Why these arguments are not for this kernel, null if they are; itself null if all are. The
  // dispatcher then takes the next family that serves the role.
  const char* (*refuses)(const void* params);
  int registers;  // of a thread at the launch, which its warpgroups share out among them; 0: any
};

// Of a thread, that setmaxnreg is asked for: a multiple of 8 that an instruction can name.
constexpr int MOST_REGISTERS = 240;

// What a thread has at its launch where so many fill a multiprocessor, a multiple of 128: with
// setmaxnreg in it, a kernel is compiled for that many.
constexpr int registers_at_launch(int threads) {
  const int each = 65536 / threads / 8 * 8;
  return each < MOST_REGISTERS ? each : MOST_REGISTERS;
}

// Those that the roles of Config's block were shared out from; 0 where there are no roles.
template <class Config>
constexpr auto shared_out(int) -> decltype(Config::CONSUMER_REGISTERS) {
  return registers_at_launch(Config::THREADS * Config::MIN_BLOCKS);
}
template <class Config>
constexpr int shared_out(...) {
  return 0;
}

// Config::TAKES_TICKETS; false where there is none.
template <class Config>
constexpr auto takes_tickets(int) -> decltype(Config::TAKES_TICKETS) {
  return Config::TAKES_TICKETS;
}
template <class Config>
constexpr bool takes_tickets(...) {
  return false;
}

// Config::CLUSTER; 1 where there is none.
template <class Config>
constexpr auto cluster_of(int) -> decltype(Config::CLUSTER) {
  return Config::CLUSTER;
}
template <class Config>
constexpr int cluster_of(...) {
  return 1;
}

template <class Config, class Params>
KernelEntry make_entry(void (*kernel)(Params),
                       cudaError_t (*launch)(const void*, const void*, cudaStream_t),
                       const char* (*refuses)(const void*) = nullptr) {
  return {reinterpret_cast<const void*>(kernel),
          launch,
          Config::THREADS,
          Config::SMEM_BYTES,
          Config::BLOCK_ROWS,
          Config::MIN_BLOCKS,
          cluster_of<Config>(0),
          takes_tickets<Config>(0),
          refuses,
          shared_out<Config>(0)};
}

// Blocks of a kernel's size, with an attribute that has to outlive the launch.
inline cudaLaunchConfig_t launch_config(dim3 blocks, int threads, int dynamic_smem,
                                        cudaStream_t stream, cudaLaunchAttribute& attribute) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(dynamic_smem);
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

// Launches blocks of Config's size, in clusters where it has such: of these so many. No block is no
// work, more than the grid's limit an error.
template <class Config>
cudaError_t launch_1d(const void* kernel, const void* params, int64_t blocks, cudaStream_t stream) {
  constexpr int CLUSTER = cluster_of<Config>(0);
  if (blocks == 0) return cudaSuccess;
  if (blocks > INT32_MAX / CLUSTER) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks * CLUSTER));
  void* arguments[] = {const_cast<void*>(params)};
  if constexpr (CLUSTER == 1) {
    return cudaLaunchKernel(kernel, grid, dim3(Config::THREADS), arguments, Config::SMEM_BYTES,
                            stream);
  } else {
    cudaLaunchAttribute clusters = in_clusters(CLUSTER);
    const auto config = launch_config(grid, Config::THREADS, Config::SMEM_BYTES, stream, clusters);
    return cudaLaunchKernelExC(&config, kernel, arguments);
  }
}

}  // namespace flash_dist

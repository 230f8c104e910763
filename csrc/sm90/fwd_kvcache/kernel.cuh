// Hopper forward that sums in the same order as attention to a cache (core/decode.h): out and lse
// of a query have the same bits as from the decode kernels.
//
// Block and pipeline are those of sm90/fwd/kernel.cuh, but a warp loads, one box per lane, and keys
// are in ascending order. A multiprocessor has at most one block. Registers hold O of a key block
// and of a group of them. Shared memory (global from PARKED_COLUMNS columns on) has O of the tile.
#pragma once

#include "ptx/registers.cuh"
#include "sm90/fwd_kvcache/config.h"
#include "sm90/fwd_kvcache/consumer.cuh"
#include "sm90/fwd_kvcache/launch.h"
#include "sm90/fwd_kvcache/loader.cuh"

namespace flash_dist {

template <class Config>
__device__ __forceinline__ void fwd_kvcache_sm90_block(const typename Config::Params& params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  make_fwd_barriers<Config>(params, smem);

  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x < 32) FwdKvcacheLoader<Config>{params, smem}.run();
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    FwdKvcacheConsumer<Config>{params, smem}.run();
  }
}

}  // namespace flash_dist

// Forward attention on Hopper for head_dims whose output does not fit in the registers of a block:
// out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      A cluster of two blocks for each tile of 128 queries.
// Block     One loading thread in its own warpgroup, and two consumer warpgroups of 64 queries
//           each. Both blocks have all queries of the tile. For every 128 keys, each block
//           computes S and P of 64 of them. O is split by columns: each block multiplies P of all
//           keys with its half of V.
// Exchange  P and the row maxima pass through distributed shared memory, from each warp to the warp
//           with the same queries in the other block.
// Shared    Q, whose buffer stages the output at the end; STAGES slices, each 64 keys x SLICE
//           columns of K or V; P of the other block.
// Pipeline  Slices pass through one ring in the order in which they are read (loader.cuh), and are
//           released one by one (consumer.cuh).
//
// For 128 x 128 scores at head_dim 512, a multiprocessor reads 256 KiB of Q and K, 128 KiB of V and
// 2 x 16 KiB of P from shared memory, and TMA writes 128 KiB to it. This takes 1.06 times as long
// as the products.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "sm90/fwd_pair/config.h"
#include "sm90/fwd_pair/consumer.cuh"
#include "sm90/fwd_pair/launch.h"
#include "sm90/fwd_pair/loader.cuh"

namespace flash_dist {

template <class Config>
__device__ __forceinline__ void fwd_pair_sm90_block(const FwdSm90Params& params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_maps(params.q, params.k, params.v, params.out);
    smem.make_barriers();
    for (int warp = 0; warp < Config::CONSUMER_WARPS; ++warp) {
      mbarrier_expect(shared_address(&smem.exchange.stats_full[warp]),
                      Config::Exchange::STATS_BYTES);
      mbarrier_expect(shared_address(&smem.exchange.weights_full[warp]),
                      Config::Exchange::WEIGHTS_BYTES);
    }
    smem.work.place_block(params.p, Config::BLOCK_M, fresh_block() / Config::CLUSTER);
    if (smem.work.has_queries()) {
      smem.work.find_keys(params.p, Config::BLOCK_M, Config::BLOCK_N);
    }
  }
  __syncwarp();
  cluster_sync();  // barriers of both blocks and the work tile are initialized
  const int rank = cluster_rank();
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x == 0 && smem.work.has_queries() && smem.work.has_keys()) {
      FwdPairLoader<Config>{params, smem, rank, {}}.run();
    }
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    FwdPairConsumer<Config>(params, smem, rank).run();
  }
  // Neither block waits for the other at the end: each has received all that the other one sends.
}

}  // namespace flash_dist

// dK and dV on Hopper for head_dims at which they do not fit together in the registers of two
// blocks. Two launches compute one of them each:
//
//   first    S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   second   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// The first launch stores rounded P^T where the second launch stores dS^T (core/ds_layout.h). In
// fp16 it stores 2^8 P^T, as in dkdv_pair.cuh.
//
// Grid      A cluster of two blocks for each tile of 128 keys.
// Block     A warpgroup of which one thread loads, and two consumers of 64 keys each. Both blocks
//           have all keys of the tile. For every 128 queries, each block computes P or dS of 64 of
//           them (an item). The sum is split by columns: each block multiplies P or dS of all
//           queries by its half of dO or Q.
// Exchange  P or dS passes through distributed shared memory, from each warp to the warp with the
//           same keys in the other block.
// Shared    K or V, whose buffer stages the sum at the end; STAGES slices, each 64 queries x SLICE
//           columns of Q or dO, or P; P or dS of the other block.
// Pipeline  Slices pass through one ring in the order in which they are read (loader.cuh), and are
//           released one by one (consumer.cuh), as in fwd_pair.
#pragma once

#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "sm90/bwd_halves/config.h"
#include "sm90/bwd_halves/consumer.cuh"
#include "sm90/bwd_halves/launch.h"
#include "sm90/bwd_halves/loader.cuh"

namespace flash_dist {

template <class Config>
__device__ __forceinline__ void dkdv_halves_sm90_block(const typename Config::Params& params) {
  const BwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DkdvBlock block(p, Config::BLOCK_N, fresh_block() / Config::CLUSTER);
  const Sequence sequence(p, block.batch);
  if (block.key0 >= sequence.seqlen_k) return;  // both blocks of the cluster return
  if (threadIdx.x == 0) {
    prefetch_maps(params.q, params.k, params.v, params.dout);
    smem.make_barriers();
    smem.work.block = block;  // read by load_keys()
    smem.work.sequence = sequence;
  }
  const int rank = cluster_rank();
  DkdvHalvesLoader<Config> loader{params, smem, rank};
  if (threadIdx.x == 0) {
    loader.load_keys();
    find_dkdv_work<Config>(smem.work, p, block, sequence);
  }
  __syncwarp();
  cluster_sync();  // barriers of both blocks and the work are initialized
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x == 0) loader.run();
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    DkdvHalvesConsumer<Config>(params, smem, rank).run();
  }
}

}  // namespace flash_dist

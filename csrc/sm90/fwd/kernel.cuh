// Forward attention on Hopper: out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      one block for each multiprocessor, which takes one tile of queries after the other; or
//           one for each tile, if tiles differ in length and there is no counter of tiles.
// Block     a warpgroup of which one thread loads, and CONSUMERS warpgroups of 64 queries each.
// Shared    Q tile, STAGES tiles of K and of V, the output tile, work tiles (work.cuh).
// Pipeline  The copy engine fills a tile and arrives at its full barrier; a consumer warp that has
//           read it arrives at its empty barrier. S = Q @ K(j - 1).T is issued before P @ V(j), so that the
//           matrix units work while the softmax of step j - 1 waits for S only. Key
//           blocks are taken from the last to the first, so that those that need a causal mask
//           come first. The loader is ahead: the next Q, K and V arrive while out is stored.
//
// The result of a tile does not depend on the block that takes it.
#pragma once

#include <type_traits>

#include "ptx/registers.cuh"
#include "sm90/fwd/bias.cuh"
#include "sm90/fwd/config.h"
#include "sm90/fwd/consumer.cuh"
#include "sm90/fwd/launch.h"
#include "sm90/fwd/loader.cuh"

namespace flash_dist {

template <class Config>
__device__ __forceinline__ void fwd_sm90_block(const typename Config::Params& params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  if constexpr (Config::HAS_BIAS) {
    if (threadIdx.x == 0) smem.bias_barriers.make(Config::CONSUMERS * WARPS_OF_GROUP);
  }
  make_fwd_barriers<Config>(params, smem);

  // Calls f with the tiles that suit the call's mask.
  const auto with_tiles = [&](auto f) {
    [[maybe_unused]] constexpr KeySource FIRST =
        Config::LIST_N == Config::BLOCK_N ? KeySource::BOTH : KeySource::RANGES;
    if constexpr (Config::HAS_BIAS) {
      if (Config::TAKES_FP32 && params.p.bias.is_fp32) {
        if constexpr (Config::TAKES_FP32) f(FwdBiasSm90Tiles<Config, true>{});
      } else {
        f(FwdBiasSm90Tiles<Config, false>{});
      }
    } else if constexpr (Config::ONE_MAINLOOP) {
      f(FwdSm90Tiles<Config, Config::BLOCK_N, FIRST>{});
    } else if (params.p.mask.kind != MaskKind::TILES) {
      f(FwdSm90Tiles<Config, Config::BLOCK_N, FIRST>{});
    } else {
      f(FwdSm90Tiles<Config, Config::LIST_N, KeySource::LISTS>{});
    }
  };
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x != 0) return;
    with_tiles([&](auto tiles) { FwdSm90Loader<decltype(tiles)>{params, smem}.run(); });
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    with_tiles([&](auto tiles) { FwdSm90Consumer<decltype(tiles)>{params, smem}.run(); });
  }
}

}  // namespace flash_dist

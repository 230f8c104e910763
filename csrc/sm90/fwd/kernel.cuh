// Forward attention on Hopper: out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      MIN_BLOCKS blocks per multiprocessor, each of which takes one query tile after the
//           other; or one block per tile, if tiles differ in length and there is no tile counter.
// Block     One loading thread in its own warpgroup, and CONSUMERS warpgroups of 64 queries each. A
//           second loading thread copies a bias of fp32. BIAS_WARPS warps, four of them behind the
//           consumers, copy a bias that no tensor map describes.
// Shared    Q tile, STAGES tiles of K and of V, the output tile, work tiles (work.cuh).
// Pipeline  TMA fills a tile and arrives at its full barrier. A consumer warp that has read the
//           tile arrives at its empty barrier. S = Q @ K(j - 1).T is issued before P @ V(j): the
//           tensor cores then work during the softmax of step j - 1. Key blocks are taken from the
//           last to the first, so that the key blocks that a causal mask cuts come first. The
//           loader is ahead of the consumers: the next Q, K and V arrive while out is stored.
//
// The result of a tile does not depend on which block takes it.
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
  int bias_warps = 0;  // that load only the bias
  if constexpr (Config::HAS_BIAS) {
    bias_warps = params.bias_in_boxes ? Config::BIAS_LOADERS : BIAS_WARPS;
    const int fillers = params.bias_in_boxes ? 1 : BIAS_WARPS;
    if (threadIdx.x == 0) smem.bias_barriers.make(Config::CONSUMERS * WARPS_OF_GROUP, fillers);
  }
  make_fwd_barriers<Config>(params, smem, bias_warps);

  // Calls f with the tile type for the call's mask.
  const auto with_tiles = [&](auto f) {
    [[maybe_unused]] constexpr KeySource FIRST =
        Config::LIST_N == Config::BLOCK_N ? KeySource::BOTH : KeySource::RANGES;
    if constexpr (Config::HAS_BIAS) {
      f(FwdBiasSm90Tiles<Config>{});
    } else if constexpr (Config::ONE_MAINLOOP) {
      f(FwdSm90Tiles<Config, Config::BLOCK_N, FIRST>{});
    } else if (params.p.mask.kind != MaskKind::TILES) {
      f(FwdSm90Tiles<Config, Config::BLOCK_N, FIRST>{});
    } else {
      f(FwdSm90Tiles<Config, Config::LIST_N, KeySource::LISTS>{});
    }
  };
  constexpr int CONSUMERS_END = (1 + Config::CONSUMERS) * WARPGROUP;
  if (threadIdx.x < WARPGROUP || (Config::HAS_BIAS && threadIdx.x >= CONSUMERS_END)) {
    give_registers<Config::LOADER_REGISTERS>();
    if constexpr (Config::HAS_BIAS) {
      const int warp = bias_warp<Config>();
      if (warp >= 0 && warp < bias_warps) {
        with_tiles([&](auto tiles) { FwdSm90BiasLoader<decltype(tiles)>{params, smem}.run(); });
      }
    }
    if (threadIdx.x != 0) return;
    with_tiles([&](auto tiles) { FwdSm90Loader<decltype(tiles)>{params, smem}.run(); });
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    with_tiles([&](auto tiles) { FwdSm90Consumer<decltype(tiles)>{params, smem}.run(); });
  }
}

}  // namespace flash_dist

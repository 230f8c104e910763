// The tiles that loader and consumers of the forward kernel for Hopper hand to each other.
#pragma once

#include "core/panels.cuh"
#include "sm90/fwd/config.h"
#include "sm90/stages.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

template <class Config, int BLOCK_N, Walk WALK>
struct FwdSm90Tiles {
  using Smem = typename Config::Smem;
  using Steps = KeySteps<BLOCK_N, WALK>;
  using QTile = Panels<Config::BLOCK_M>;
  using KTile = Panels<BLOCK_N>;
  using Queries = Ring<Config::Q_STAGES>;
  using Keys = Ring<Config::STAGES>;
  using Works = Ring<WORKS>;
  static constexpr int K_BYTES = Config::template K_BYTES<BLOCK_N>;
  static constexpr int V_BYTES = Config::template V_BYTES<BLOCK_N>;
};

}  // namespace flash_dist

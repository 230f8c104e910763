// The tile types of the forward kernel for Hopper.
#pragma once

#include "core/panels.cuh"
#include "sm90/fwd/config.h"
#include "sm90/stages.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

// Config_ with tiles for steps of BLOCK_N_ keys, which come from SOURCE_.
template <class Config_, int BLOCK_N_, KeySource SOURCE_>
struct FwdSm90Tiles : Config_ {
  using Config = Config_;
  static constexpr int BLOCK_N = BLOCK_N_;
  static constexpr KeySource SOURCE = SOURCE_;
  using Steps = KeySteps<BLOCK_N, SOURCE>;
  using QTile = Panels<Config::BLOCK_M>;
  using KTile = Panels<BLOCK_N>;
  using Queries = Ring<Config::Q_STAGES>;
  using Keys = Ring<Config::STAGES>;
  using Works = Ring<WORKS>;
  struct BiasFragment {};
  static constexpr int K_TILE_BYTES = Config::template K_BYTES<BLOCK_N>;
  static constexpr int V_TILE_BYTES = Config::template V_BYTES<BLOCK_N>;
};

}  // namespace flash_dist

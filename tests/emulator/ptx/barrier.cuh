// csrc/ptx/barrier.cuh in the emulator.
#pragma once

#include "block.h"

namespace flash_dist {

inline void barrier_sync(int id, int threads) { emulator::synchronize_some(id, threads); }

}  // namespace flash_dist

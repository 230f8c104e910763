// csrc/ptx/barrier.cuh in the emulator.
#pragma once

#include "block.h"

namespace flash_dist {

inline void barrier_sync(int id, int threads) { emulator::come_to(id, threads, true); }
inline void barrier_arrive(int id, int threads) { emulator::come_to(id, threads, false); }

}  // namespace flash_dist

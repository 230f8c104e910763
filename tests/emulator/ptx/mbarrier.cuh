// csrc/ptx/mbarrier.cuh in the emulator.
#pragma once

#include "block.h"

namespace flash_dist {

inline void mbarrier_init(uint32_t barrier, int arrivals) {
  emulator::make_barrier(barrier, arrivals);
}
inline void mbarriers_made() {}
inline void mbarrier_arrive(uint32_t barrier) { emulator::arrive(barrier, 0); }
inline void mbarrier_expect(uint32_t barrier, int bytes) { emulator::arrive(barrier, bytes); }
inline void mbarrier_expect_bytes(uint32_t barrier, int bytes) { emulator::expect(barrier, bytes); }
inline void mbarrier_arrive_behind_copies(uint32_t barrier) {
  emulator::arrive_behind_copies(barrier);
}
inline void mbarrier_wait(uint32_t barrier, int parity) {
  emulator::wait_for_phase(barrier, parity);
}

}  // namespace flash_dist

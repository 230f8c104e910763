// csrc/ptx/copy_words.cuh in the emulator.
#pragma once

#include "block.h"

namespace flash_dist {

inline void cp_async_4(uint32_t smem, const void* src, bool valid = true) {
  emulator::start_copy(smem, valid ? src : nullptr, 4);
}

}  // namespace flash_dist

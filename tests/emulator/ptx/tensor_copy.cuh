// What the kernels of a cache take of csrc/ptx/tensor_copy.cuh, in the emulator.
#pragma once

#include "block.h"

namespace flash_dist {

inline void fence_proxy_async() { emulator::fence(); }

}  // namespace flash_dist

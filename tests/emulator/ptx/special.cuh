// csrc/ptx/special.cuh in the emulator.
#pragma once

#include "cuda_runtime_api.h"

namespace flash_dist {

inline int fresh_thread() { return static_cast<int>(threadIdx.x); }
inline int fresh_block() { return static_cast<int>(blockIdx.x); }

}  // namespace flash_dist

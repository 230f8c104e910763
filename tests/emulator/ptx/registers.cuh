// csrc/ptx/registers.cuh in the emulator, whose threads have unlimited registers.
#pragma once

#include "cuda_runtime_api.h"

namespace flash_dist {

inline int fresh_thread() { return static_cast<int>(threadIdx.x); }
inline int fresh_block() { return static_cast<int>(blockIdx.x); }
inline void forget(uint32_t&, uint32_t&) {}
inline int64_t fresh(int64_t x) { return x; }

template <int REGISTERS>
void give_registers() {}
template <int REGISTERS>
void take_registers() {}

}  // namespace flash_dist

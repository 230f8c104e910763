// csrc/ptx/registers.cuh in the emulator, whose threads have as many as they like.
#pragma once

namespace flash_dist {

template <int REGISTERS>
void give_registers() {}
template <int REGISTERS>
void take_registers() {}

}  // namespace flash_dist

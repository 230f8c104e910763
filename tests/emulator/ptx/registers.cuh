// csrc/ptx/registers.cuh in the emulator, whose threads have unlimited registers.
#pragma once

namespace flash_dist {

template <int REGISTERS>
void give_registers() {}
template <int REGISTERS>
void take_registers() {}

}  // namespace flash_dist

// csrc/ptx/copy.cuh in the emulator.
#pragma once

#include <cstdint>
#include <cstring>

#include "block.h"
#include "cuda_runtime_api.h"

namespace flash_dist {

extern uint8_t smem_bytes[];

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - smem_bytes);
}

inline void cp_async_16(uint32_t smem, const void* src, bool valid) {
  emulator::start_copy(smem, valid ? src : nullptr);
}
inline void cp_async_commit() { emulator::close_group(); }
template <int PENDING>
void cp_async_wait() {
  emulator::wait_for_groups(PENDING);
}

template <class Number>
Number load_number(const void* src) {
  Number x;
  std::memcpy(&x, emulator::read_global(src, sizeof x), sizeof x);
  return x;
}
inline uint32_t load_constant_2(const void* src) { return load_number<uint16_t>(src); }
inline uint32_t load_constant_4(const void* src) { return load_number<uint32_t>(src); }
inline float load_constant_float(const void* src) { return load_number<float>(src); }
inline float2 load_constant_float2(const void* src) { return load_number<float2>(src); }
inline uint4 load_global_16(const void* src) { return load_number<uint4>(src); }
inline void store_global_16(void* dst, uint4 r) {
  std::memcpy(emulator::write_global(dst, 16), &r, 16);
}
inline uint4 load_shared_16(uint32_t smem) {
  uint4 r;
  std::memcpy(&r, emulator::read_shared(smem, 16), 16);
  return r;
}
inline float2 load_shared_8(uint32_t smem) {
  float2 r;
  std::memcpy(&r, emulator::read_shared(smem, 8), 8);
  return r;
}
inline uint32_t load_shared_4(uint32_t smem) {
  uint32_t x;
  std::memcpy(&x, emulator::read_shared(smem, 4), 4);
  return x;
}
// Writing the same bytes again is no write: two warpgroups may clear the same rows.
inline void store_shared_16(uint32_t smem, uint4 r) {
  if (std::memcmp(smem_bytes + smem, &r, 16) == 0) return;
  std::memcpy(emulator::write_shared(smem, 16), &r, 16);
}
inline void store_shared_4(uint32_t smem, uint32_t r) {
  std::memcpy(emulator::write_shared(smem, 4), &r, 4);
}

}  // namespace flash_dist

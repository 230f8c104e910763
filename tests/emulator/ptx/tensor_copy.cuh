// The part of csrc/ptx/tensor_copy.cuh that emulated kernels use. A requested box
// arrives later, row by row. A stored box is written at once.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "block.h"

namespace flash_dist {

inline void prefetch_map(const CUtensorMap&) {}
template <class... Maps>
void prefetch_maps(const Maps&...) {}

struct BoxPlace {
  int column, row, member, head_kv, batch;
};

// Calls f(address, element, bytes) for each 16 bytes of a box. element null: outside the tensor.
// bytes: those inside the tensor.
template <class F>
void for_chunks(uint32_t smem, const CUtensorMap& map, const BoxPlace& at, F f) {
  const auto within = [](int place, int size) { return 0 <= place && place < size; };
  const bool exists = within(at.batch, map.batches) && within(at.head_kv, map.heads_kv) &&
                      within(at.member, map.members);
  const uint16_t* head =
      map.data + at.batch * map.batch + at.head_kv * map.head_kv + at.member * map.member;
  for (int i = 0; i < map.box_rows; ++i) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int row = at.row + i, column = at.column + chunk * 8;
      const bool inside = exists && within(row, map.rows) && column < map.columns;
      const uint32_t to = smem + i * 128 + chunk * 16;
      f(to ^ (to >> 7 & 7) << 4, inside ? head + row * map.row + column : nullptr,
        inside ? std::min(2 * (map.columns - column), 16) : 16);
    }
  }
}

inline void load_box(uint32_t smem, const CUtensorMap& map, const BoxPlace& at, uint32_t barrier) {
  for_chunks(smem, map, at, [&](uint32_t to, const uint16_t* from, int exist) {
    emulator::start_box_copy(to, from, barrier, exist);
  });
  emulator::close_box();
}

enum class Caching : uint64_t { NORMAL, EVICT_FIRST };

inline void load_box(uint32_t smem, const CUtensorMap& map, const BoxPlace& at, uint32_t barrier,
                     Caching) {
  load_box(smem, map, at, barrier);
}
inline void prefetch_box(const CUtensorMap&, const BoxPlace&) {}

inline void load_bytes(uint32_t smem, const void* src, int bytes, uint32_t barrier) {
  if (bytes % 16 != 0) emulator::fail("a copy of %d bytes", bytes);
  for (int i = 0; i < bytes; i += 16) {
    emulator::start_box_copy(smem + i, static_cast<const uint8_t*>(src) + i, barrier, 16);
  }
  emulator::close_box();
}

inline void store_box(const CUtensorMap& map, const BoxPlace& at, uint32_t smem) {
  for_chunks(smem, map, at, [](uint32_t from, const uint16_t* to, int) {
    const uint8_t* data = emulator::read_shared(from, 16, true);
    if (to != nullptr) std::memcpy(emulator::write_global(const_cast<uint16_t*>(to), 16), data, 16);
  });
}
inline void store_bytes(void* dst, uint32_t smem, int bytes) {
  for (int i = 0; i < bytes; i += 16) {
    const uint8_t* data = emulator::read_shared(smem + i, 16, true);
    std::memcpy(emulator::write_global(static_cast<uint8_t*>(dst) + i, 16), data, 16);
  }
}
inline void add_floats(void* dst, uint32_t smem, int bytes) {
  for (int i = 0; i < bytes; i += 4) {
    float one;
    std::memcpy(&one, emulator::read_shared(smem + i, 4, true), 4);
    *reinterpret_cast<float*>(emulator::write_global(static_cast<uint8_t*>(dst) + i, 4)) += one;
  }
}
inline void commit_stores() {}
inline void wait_until_written() {}
inline void fence_proxy_async_global() {}
template <int PENDING>
void wait_until_read() {}

inline void fence_proxy_async() { emulator::fence(); }

}  // namespace flash_dist

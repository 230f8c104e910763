// The part of csrc/ptx/tensor_copy.cuh that kernels of a cache use, in the emulator: a box arrives
// some time after its request, row by row.
#pragma once

#include <cuda.h>

#include "block.h"

namespace flash_dist {

inline void prefetch_map(const CUtensorMap&) {}

struct BoxPlace {
  int column, row, member, head_kv, batch;
};

inline void load_box(uint32_t smem, const CUtensorMap& map, const BoxPlace& at, uint32_t barrier) {
  const bool exists = 0 <= at.batch && at.batch < map.batches && at.member == 0 &&
                      0 <= at.head_kv && at.head_kv < map.heads_kv;
  const uint16_t* head = map.data + at.batch * map.batch + at.head_kv * map.head_kv;
  for (int i = 0; i < map.box_rows; ++i) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int row = at.row + i, column = at.column + chunk * 8;
      const bool inside = exists && 0 <= row && row < map.rows && column < map.columns;
      const uint32_t to = smem + i * 128 + chunk * 16;
      emulator::start_box_copy(to ^ (to >> 7 & 7) << 4,
                               inside ? head + row * map.row + column : nullptr, barrier);
    }
  }
  emulator::close_box();
}

inline void fence_proxy_async() { emulator::fence(); }

}  // namespace flash_dist

// The part of the driver's header that core/maps.h uses: a tensor map for the emulator's
// tensor_copy.cuh.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  static constexpr uint64_t MARK = 0x6d61702074657374;
  uint64_t mark;
  const uint16_t* data;
  int64_t row, member, head_kv, batch;  // strides in elements
  int columns, rows, members, heads_kv, batches, box_rows;
};

// What core/maps.h takes of the driver's header: a map that the emulator itself reads, tensor_copy.cuh.
#pragma once

#include <cstdint>

struct alignas(64) CUtensorMap {
  static constexpr uint64_t MARK = 0x6d61702074657374;
  uint64_t mark;
  const uint16_t* data;
  int64_t row, head_kv, batch;  // strides in elements
  int columns, rows, heads_kv, batches, box_rows;
};

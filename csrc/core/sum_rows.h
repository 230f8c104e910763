// Where the rows of the fp32 sums of dK and dV lie: partial sums of a group split, and sums kept
// between query chunks.
#pragma once

#include <cstdint>

namespace flash_dist {

struct SumRows {
  int64_t first;        // of key 0 of the chunk's first unit, of split 0
  int64_t split, unit;  // from one split, or unit, to the next
};

}  // namespace flash_dist

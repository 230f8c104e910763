// The order of blocks. Blocks of a group (a query head or kv head of a batch entry) share data.
// Causal tiles of a group differ in length and are ordered longest first. Blocks are numbered so
// that `width` groups advance together, tile by tile. With one group at a time, the long tiles of
// the last group would start last. With all groups at once, blocks would share nothing in L2.
//
// A block finds its tile by divisions. The host knows the divisors, so the kernel multiplies
// instead: n / d = floor(n * m / 2^(31 + l)) for 0 <= n < 2^31, l = ceil(log2(d)) and m =
// ceil(2^(31 + l) / d) (Granlund and Montgomery, Division by Invariant Integers using
// Multiplication, 1994).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/params.h"
#include "native/entry.h"

namespace flash_dist {

// Prepares divisions by a number up to INT32_MAX. The divisor of an empty grid is 0, which becomes
// 1.
inline Divisor make_divisor(int64_t divisor) {
  divisor = std::max<int64_t>(divisor, 1);
  int log2 = 0;
  while (int64_t{1} << log2 < divisor) ++log2;
  const uint64_t multiplier = ((uint64_t{1} << (31 + log2)) + divisor - 1) / divisor;
  return {static_cast<int>(divisor), static_cast<uint32_t>(multiplier), log2 - 1};
}

inline BlockOrder make_order(int64_t tiles, int64_t groups, int width) {
  const int64_t last = groups % width;
  return {make_divisor(tiles * width), make_divisor(width), make_divisor(last == 0 ? width : last),
          static_cast<int>(groups / width)};
}

// Launches a grid of `groups` groups of `tiles` blocks. all: the kernel's parameters, either p
// itself or a struct that contains p.
template <class Params, class Grid, class All>
cudaError_t launch_in_order(const KernelEntry& entry, Params& p, const Grid& grid, const All& all,
                            cudaStream_t stream) {
  const int64_t blocks = grid.tiles * grid.groups;
  if (0 < blocks && blocks <= INT32_MAX) {
    p.order = make_order(grid.tiles, grid.groups, p.heads_together);
  }
  return launch_1d(entry, &all, blocks, stream);
}

__device__ __forceinline__ int divide(int n, const Divisor& d) {
  return d.divisor == 1 ? n : static_cast<int>(__umulhi(n, d.multiplier) >> d.shift);
}

struct BlockPlace {
  int tile, group;

  __device__ __forceinline__ BlockPlace(int index, const BlockOrder& order) {
    const int batch = divide(index, order.batch_blocks);
    const Divisor& here = batch < order.whole_batches ? order.width : order.last_width;
    const int rest = index - batch * order.batch_blocks.divisor;
    tile = divide(rest, here);
    group = batch * order.width.divisor + rest - tile * here.divisor;
  }
};

}  // namespace flash_dist

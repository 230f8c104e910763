// The order of blocks. Blocks of a group (a head, a kv head) share data, and the tiles of a causal
// group differ in length, longest first. Blocks are numbered so that `width` groups advance
// together, tile by tile: with one group at a time the last group's long tiles would start last;
// with all at once nothing would be shared in L2.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_dist {

struct BlockPlace {
  int tile, group;

  __device__ __forceinline__ BlockPlace(int index, int tiles, int groups, int width) {
    const int batch = index / (tiles * width);
    const int begin = batch * width;
    const int here = min(width, groups - begin);
    const int rest = index - begin * tiles;
    tile = rest / here;
    group = begin + rest - tile * here;
  }
};

}  // namespace flash_dist

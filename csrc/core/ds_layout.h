// Where the spilled dS lies. dS^T of one query head is cut into 64x64 tiles (key tile n, query tile
// m); only tiles that the mask can make visible have a slot, key tile by key tile, query tiles
// ascending. A tile is 4 x 4 blocks of 16 keys by 16 queries; a block is the A fragment of mma
// m16n8k16 as a warp holds it: 16 bytes per lane.
#pragma once

#include <cuda_runtime_api.h>  // __host__ and __device__, for g++ too

#include <cstdint>

namespace flash_dist {

constexpr int DS_TILE = 64;
constexpr int DS_TILE_BYTES = DS_TILE * DS_TILE * 2;
constexpr int DS_BLOCK_BYTES = 16 * 16 * 2;

struct DsLayout {
  int query_tiles;
  int shift;  // key tile n needs the query tiles from max(0, n - shift) on; full: shift is huge

  __host__ __device__ DsLayout(int seqlen_q, int seqlen_k, bool causal)
      : query_tiles((seqlen_q + DS_TILE - 1) / DS_TILE),
        shift(causal ? tiles_up(seqlen_k - seqlen_q) : 1 << 30) {}

  // First query tile with a slot for key tile n, query_tiles if none.
  __host__ __device__ int query_begin(int n) const {
    const int begin = n - shift;
    return begin < 0 ? 0 : (begin < query_tiles ? begin : query_tiles);
  }

  // Slots of the key tiles [first, n) of one head.
  __host__ __device__ int64_t slots(int first, int n) const {
    return static_cast<int64_t>(n - first) * query_tiles - (skipped(n) - skipped(first));
  }

 private:
  __host__ __device__ static int tiles_up(int x) {
    return x >= 0 ? (x + DS_TILE - 1) / DS_TILE : -(-x / DS_TILE);
  }

  // sum of min(max(i - shift, 0), query_tiles) over all i < n, counted from i = min(shift, 0)
  __host__ __device__ int64_t skipped(int n) const {
    const int64_t k = static_cast<int64_t>(n) - shift;
    if (k <= 0) return 0;
    if (k <= query_tiles) return k * (k - 1) / 2;
    return static_cast<int64_t>(query_tiles) * (query_tiles - 1) / 2 +
           (k - query_tiles) * query_tiles;
  }
};

}  // namespace flash_dist

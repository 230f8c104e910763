// Keeps O of a work tile in global memory, cached by L2, while its next group of keys is computed.
#pragma once

#include "core/decode_rows.cuh"

namespace flash_dist {

// O, top and sum of a work tile in global memory. Each thread reads back what it has written, 16
// bytes at a time. Adjacent threads use adjacent memory.
template <class Place, int OT>
struct TileRest {
  using Config = typename Place::Config;
  static constexpr int CHUNKS = OT + 1;  // 16-byte chunks per lane: top and sum of its rows, then O
  // The data fit in the two partials reserved per split, which have room for 2 * partial_rows rows.
  // In the tightest case, 17 rows, two warps write 16 rows each; with more rows, more room is left.
  static_assert(Config::Splits::RESTING == 2);
  static_assert(2 * Config::CONSUMERS * CHUNKS * 32 * 4 <= 2 * 17 * Config::HEAD_DIM_V);

  float4* chunks;  // null: no row of this warp exists

  __device__ __forceinline__ TileRest(const DecodeParams& p, const Place& own) : chunks(nullptr) {
    const int thread = fresh_thread(), warp = own.row0 / 16 + thread / 32 % 4;
    if (warp * 16 >= p.partial_rows) return;
    const int64_t row =
        int64_t{Config::Splits::RESTING} * split_of_block<Config>(p) * p.partial_rows;
    chunks = reinterpret_cast<float4*>(p.partial_out + row * Config::HEAD_DIM_V) +
             (warp * Config::CONSUMERS + own.part) * CHUNKS * 32 + thread % 32;
  }

  __device__ __forceinline__ void store(const Partial<OT>& tile) const {
    if (chunks == nullptr) return;
    chunks[0] = {tile.top[0], tile.top[1], tile.sum[0], tile.sum[1]};
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float (&x)[4] = tile.out.x[0][n];
      chunks[(n + 1) * 32] = {x[0], x[1], x[2], x[3]};
    }
  }

  // Combines the kept O, top and sum with a later group; `later` receives the result.
  __device__ __forceinline__ void combine_into(Partial<OT>& later) const {
    constexpr int AT_ONCE = 8;
    if (chunks == nullptr) return;
    const float4 stats = chunks[0];
    const Combine combines[2] = {{stats.x, later.top[0]}, {stats.y, later.top[1]}};
    later.top[0] = combines[0].top;
    later.top[1] = combines[1].top;
    later.sum[0] = combines[0](stats.z, later.sum[0]);
    later.sum[1] = combines[1](stats.w, later.sum[1]);
#pragma unroll
    for (int first = 0; first < OT; first += AT_ONCE) {
      __syncwarp();  // keeps the compiler from moving loads up: there are no registers for them
#pragma unroll
      for (int n = first; n < first + AT_ONCE; ++n) {
        float (&x)[4] = later.out.x[0][n];
        const float4 earlier = chunks[(n + 1) * 32];
        x[0] = combines[0](earlier.x, x[0]);
        x[1] = combines[0](earlier.y, x[1]);
        x[2] = combines[1](earlier.z, x[2]);
        x[3] = combines[1](earlier.w, x[3]);
      }
    }
  }
};

}  // namespace flash_dist

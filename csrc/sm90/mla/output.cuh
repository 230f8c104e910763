// Stores lse, and a consumer's columns of out, 16 bytes at a time. Before a row of out is stored,
// the four lanes that share it exchange its elements.
#pragma once

#include "core/decode_rows.cuh"

namespace flash_dist {

// Transposes registers in a quad: lane i receives x[i] of each of the four lanes, in lane order.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool is_upper = threadIdx.x & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const uint32_t other =
          __shfl_xor_sync(0xffffffffu, is_upper ? x[i] : x[i + bit], static_cast<int>(bit));
      (is_upper ? x[i] : x[i + bit]) = other;
    }
  }
}

// Writes out and lse of a complete work tile.
template <class Place, int OT>
__device__ __forceinline__ void store_tile(const DecodeParams& p, const Partial<OT>& all,
                                           const DecodeCursor& at, const Place& own) {
  using Config = typename Place::Config;
  const int head = at.head;
  // NOTE: fresh_thread() makes the compiler compute the columns here. If they were known before the
  // loop over key blocks, they would take registers in it.
  const int lane = fresh_thread() % 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = at.row0(p) + own.row(h);
    const bool exists = row < at.extent.rows(p);
    const int query = divide(row, p.by_group);
    const int head_in_group = row - query * p.group;
    float inverse = 0.0f;
    if (exists) {
      const RowEnd end(p, head * p.group + head_in_group, all.top[h], all.sum[h]);
      inverse = end.inverse;
      if (own.writes_stats()) {
        p.lse[lse_begin(p, at.batch, head * p.group + head_in_group, at.extent.q0) + query] =
            end.lse;
      }
    }
    uint16_t* out =
        head_begin(p.out, at.batch, head, head_in_group) + (at.extent.q0 + query) * p.out.row;
#pragma unroll
    for (int n = 0; n < OT; n += 4) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[4] = all.out.x[0][n + i];
        x[i] = pack<typename Config::Target, typename Config::T>(
            finish_out(pair[2 * h], inverse), finish_out(pair[2 * h + 1], inverse));
      }
      transpose_in_quad(x);
      const int column = own.part * Config::COLUMNS + (n + lane) * 8;
      if (exists && column < p.head_dim_v) store_global_16(out + column, {x[0], x[1], x[2], x[3]});
    }
  }
}

}  // namespace flash_dist

// Appends new keys and values to a cache, and applies rotary embeddings to keys and queries.
//
// Grid      x = blocks of BLOCK_ROWS rows: the rows of k, then of v, then of q.
// Block     LANES threads share a row, 8 columns each.
#pragma once

#include "core/config.h"
#include "core/decode_work.cuh"
#include "core/sequence.cuh"
#include "decode_plans.h"
#include "native/entry.h"
#include "plans.h"
#include "ptx/convert.cuh"
#include "ptx/copy.cuh"

namespace flash_dist {

template <class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN>
struct AppendConfig
    : Config<AppendPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V> {
  using Base = Config<AppendPlan<HEAD_DIM, HEAD_DIM_V, PLAN>, Target, T, HEAD_DIM, HEAD_DIM_V>;
  static constexpr int LANES = HEAD_DIM / 8;
  static constexpr int BLOCK_ROWS = Base::THREADS / LANES;
  static constexpr int SMEM_BYTES = 0;
  static_assert(Base::THREADS % LANES == 0);
};

// Coordinates of the row with index `item` in a tensor [batch, rows, heads, columns].
struct RowPlace {
  int batch, row, head;

  __device__ __forceinline__ RowPlace(int64_t item, int rows, int heads) {
    head = static_cast<int>(item % heads);
    const int64_t token = item / heads;
    row = static_cast<int>(token % rows);
    batch = static_cast<int>(token / rows);
  }
};

// Returns the address of row `row` of a head of a view [batch, rows, heads, 1, columns].
__device__ __forceinline__ uint16_t* row_of(const View& view, int batch, int row, int head) {
  return head_begin(view, batch, head, 0) + row * view.row;
}

// Returns 8 columns of a row, from `column` on. Rotates pairs of columns below rotary_dim by the
// angles of `position`: columns 2j and 2j + 1 if interleaved, else j and j + rotary_dim / 2.
template <class Target, class T>
__device__ __forceinline__ uint4 rotate(const AppendParams& p, const uint16_t* row, int column,
                                        int position) {
  const uint4 own = load_global_16(row + column);
  if (p.cos == nullptr || column >= p.rotary_dim) return own;
  const int half = p.rotary_dim / 2;
  const int64_t line = int64_t{min(max(position, 0), p.rotary_rows - 1)} * half;
  const auto* cosines = static_cast<const uint16_t*>(p.cos) + line;
  const auto* sines = static_cast<const uint16_t*>(p.sin) + line;
  const uint32_t x[4] = {own.x, own.y, own.z, own.w};
  uint32_t turned[4];
  if (p.interleaved) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float2 c = unpack<T>(*reinterpret_cast<const uint32_t*>(cosines + column / 2 + i));
      const float2 s = unpack<T>(*reinterpret_cast<const uint32_t*>(sines + column / 2 + i));
      const float2 a = unpack<T>(x[i]), b = unpack<T>(x[i + 1]);
      turned[i] = pack<Target, T>(__fmaf_rn(a.x, c.x, -__fmul_rn(a.y, s.x)),
                                  __fmaf_rn(a.y, c.x, __fmul_rn(a.x, s.x)));
      turned[i + 1] = pack<Target, T>(__fmaf_rn(b.x, c.y, -__fmul_rn(b.y, s.y)),
                                      __fmaf_rn(b.y, c.y, __fmul_rn(b.x, s.y)));
    }
  } else {
    const bool first = column < half;
    const int angle = first ? column : column - half;
    const uint4 other = load_global_16(row + (first ? column + half : angle));
    const uint4 cs = load_global_16(cosines + angle), ss = load_global_16(sines + angle);
    const uint32_t y[4] = {other.x, other.y, other.z, other.w};
    const uint32_t cw[4] = {cs.x, cs.y, cs.z, cs.w}, sw[4] = {ss.x, ss.y, ss.z, ss.w};
    const float sign = first ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = unpack<T>(x[i]), b = unpack<T>(y[i]);
      const float2 c = unpack<T>(cw[i]), s = unpack<T>(sw[i]);
      turned[i] = pack<Target, T>(__fmaf_rn(a.x, c.x, sign * __fmul_rn(b.x, s.x)),
                                  __fmaf_rn(a.y, c.y, sign * __fmul_rn(b.y, s.y)));
    }
  }
  return {turned[0], turned[1], turned[2], turned[3]};
}

template <class Config>
__device__ __forceinline__ void append_block(const AppendParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  const int column = threadIdx.x % Config::LANES * 8;
  const int64_t keys = int64_t{p.batch} * p.cache.seqlen_new * p.num_heads_kv;
  int64_t item = int64_t{blockIdx.x} * Config::BLOCK_ROWS + threadIdx.x / Config::LANES;

  if (item < 2 * keys) {  // first the new rows of K, then those of V
    const bool is_v = item >= keys;
    const RowPlace at(is_v ? item - keys : item, p.cache.seqlen_new, p.num_heads_kv);
    if (column >= (is_v ? p.head_dim_v : p.head_dim)) return;
    const int position = p.cache.cache_seqlens[at.batch];
    const int key = min(max(position, 0), p.cache.capacity) + at.row;
    if (key >= p.cache.capacity) return;
    const CachePlace place(p.cache, at.batch, key);
    const uint16_t* src = row_of(is_v ? p.v : p.k, at.batch, at.row, at.head);
    const uint4 chunk =
        is_v ? load_global_16(src + column) : rotate<Target, T>(p, src, column, position + at.row);
    const View& cache = is_v ? p.cache.v : p.cache.k;
    store_global_16(row_of(cache, place.entry, place.row, at.head) + column, chunk);
    return;
  }
  item -= 2 * keys;
  if (p.rotated.data == nullptr) return;
  const RowPlace at(item, p.seqlen_q, p.num_heads_q);
  if (at.batch >= p.batch || column >= p.head_dim) return;
  const int position = p.cache.cache_seqlens[at.batch] + (p.advances ? at.row : 0);
  store_global_16(row_of(p.rotated, at.batch, at.row, at.head) + column,
                  rotate<Target, T>(p, row_of(p.q, at.batch, at.row, at.head), column, position));
}

template <class Config>
cudaError_t launch_append(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  AppendParams p = *static_cast<const AppendParams*>(params);
  p.cache.by_page = make_divisor(p.cache.page);
  const int64_t keys = int64_t{p.batch} * p.cache.seqlen_new * p.num_heads_kv;
  const int64_t queries =
      p.rotated.data == nullptr ? 0 : int64_t{p.batch} * p.seqlen_q * p.num_heads_q;
  const int64_t blocks = (2 * keys + queries + Config::BLOCK_ROWS - 1) / Config::BLOCK_ROWS;
  return launch_1d(entry, &p, blocks, stream);
}

}  // namespace flash_dist

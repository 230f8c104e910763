// Attention of few queries to the keys and values of a cache, on mma.sync.
//
// Grid      as many blocks as the GPU holds, each with a share of the units of all sequences
//           (core/decode_work.cuh): the host knows no length.
// Block     WARPS warps on 16 rows, the queries of all heads of a group, which so share one pass over
//           K and V. Of a unit of 128 keys each warp owns some columns of S, then some of O.
// Shared    a ring of tiles of K and V, Q, P.
// Pipeline  all but one stage of the ring are on their way; a unit's tiles of K, then those of V,
//           then the next unit's, of whatever task.
//
// Each unit has a softmax of its own, from nothing. Fold puts the units of a group together and the
// groups of a task; what of it other blocks have is stored, and folded by core/decode_fold.h in the
// same way.
#pragma once

#include "core/fold.cuh"
#include "core/softmax.cuh"
#include "mma/decode/config.h"
#include "mma/decode/load.cuh"
#include "mma/fragments.cuh"
#include "ptx/dependents.cuh"

namespace flash_dist {

// O of some keys for the warp's columns: 16 rows, of which a lane holds two, and their statistics.
template <int OT>
struct Partial {
  Accumulator<1, OT> out;
  float top[2], sum[2];

  __device__ __forceinline__ void clear() {
    out.clear();
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
  __device__ __forceinline__ void fold(const Partial& later) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Fold fold(top[h], later.top[h]);
      top[h] = fold.top;
      sum[h] = fold(sum[h], later.sum[h]);
#pragma unroll
      for (int n = 0; n < OT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          out.x[0][n][2 * h + e] = fold(out.x[0][n][2 * h + e], later.out.x[0][n][2 * h + e]);
        }
    }
  }
};

// What a lane knows of the rows lane / 4 and lane / 4 + 8 of a task.
struct TaskRows {
  int begin[2], end[2];  // keys that the row sees

  __device__ __forceinline__ TaskRows(const DecodeParams& p, const DecodeCursor& at) {
    const int shift = at.extent.seqlen - p.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.tile(p) * TASK_ROWS + threadIdx.x % 32 / 4 + 8 * h;
      const int i = divide(row, p.by_group) + shift;  // where the diagonal is
      const int last = p.right >= UNBOUNDED ? at.extent.seqlen : i + p.right + 1;
      begin[h] = p.left >= UNBOUNDED ? 0 : max(i - p.left, 0);
      end[h] = min(last, at.extent.seqlen);
      if (row >= p.rows) begin[h] = 0, end[h] = at.extent.seqlen;  // hides nothing
    }
  }

  // Whether no row hides a key of a unit.
  __device__ __forceinline__ bool all_see(int key0) const {
    const int first = max(begin[0], begin[1]), last = min(end[0], end[1]);
    return __all_sync(0xffffffffu, first <= key0 && key0 + UNIT_KEYS <= last);
  }
  // S of the keys from key0 on.
  template <int NT>
  __device__ __forceinline__ void hide(Accumulator<1, NT>& s, int key0) const {
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key0 + n * 8 + threadIdx.x % 4 * 2 + e % 2;
        if (key < begin[e / 2] || key >= end[e / 2]) s.x[0][n][e] = -INFINITY;
      }
  }
};

// The queries of a task on their way through registers, while another task is computed.
template <class Config>
struct QueryLoader {
  using Layout = SwizzledRows<Config::HEAD_DIM>;
  static constexpr int CHUNKS = TASK_ROWS * Layout::CHUNKS / Config::THREADS;
  uint4 chunks[CHUNKS];

  __device__ __forceinline__ void load(const DecodeParams& p, int batch, int task) {
    const int head = task % p.num_heads_kv;
    const int row0 = task / p.num_heads_kv * TASK_ROWS;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int i = c * Config::THREADS + threadIdx.x;
      const int row = row0 + i / Layout::CHUNKS, column = i % Layout::CHUNKS * 8;
      const int query = divide(row, p.by_group);
      const bool exists = batch < p.batch && row < p.rows && column < p.head_dim;
      chunks[c] = exists ? load_global_16(head_begin(p.q, batch, head, row - query * p.group) +
                                          query * p.q.row + column)
                         : uint4{0, 0, 0, 0};
    }
  }
  // The task behind that of a cursor.
  __device__ __forceinline__ void load_next(const DecodeParams& p, const DecodeCursor& at) {
    const bool is_last = at.task + 1 == tasks_of(p);
    load(p, at.batch + is_last, is_last ? 0 : at.task + 1);
  }
  __device__ __forceinline__ void store(uint32_t sQ) const {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int i = c * Config::THREADS + threadIdx.x;
      store_shared_16(sQ + Layout::offset(i / Layout::CHUNKS, i % Layout::CHUNKS), chunks[c]);
    }
  }
};

// The first of two neighbouring columns of O that a lane holds in x[0][n]: warps take turns by 16.
template <class Config>
__device__ __forceinline__ int column_of(int n) {
  return (n / 2 * Config::WARPS + threadIdx.x / 32) * 16 + n % 2 * 8 + threadIdx.x % 4 * 2;
}

// A partial result into its place in memory.
template <class Config, int OT>
__device__ __forceinline__ void store_partial(const DecodeParams& p, const Partial<OT>& part,
                                              int64_t record) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = threadIdx.x % 32 / 4 + 8 * h;
    if (row >= p.tile_rows) continue;
    const int64_t at = record * p.tile_rows + row;
    if (threadIdx.x < 32 && threadIdx.x % 4 == 0) p.partial_stats[at] = {part.top[h], part.sum[h]};
    float* out = p.partial_out + at * Config::HEAD_DIM;
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      *reinterpret_cast<float2*>(out + column_of<Config>(n)) = {part.out.x[0][n][2 * h],
                                                                part.out.x[0][n][2 * h + 1]};
    }
  }
}

// out and lse of a task.
template <class Config, int OT>
__device__ __forceinline__ void store_result(const DecodeParams& p, const Partial<OT>& all,
                                             const DecodeCursor& at) {
  const int head = at.head(p);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = at.tile(p) * TASK_ROWS + threadIdx.x % 32 / 4 + 8 * h;
    if (row >= p.rows) continue;
    const int query = divide(row, p.by_group);
    const int member = row - query * p.group;
    if (threadIdx.x < 32 && threadIdx.x % 4 == 0) {
      const int64_t head_q =
          static_cast<int64_t>(at.batch) * p.num_heads_kv * p.group + head * p.group + member;
      p.lse[head_q * p.seqlen_q + query] = finish_lse(all.top[h], all.sum[h]);
    }
    const float inverse = finish_inverse(all.sum[h]);
    uint16_t* out = head_begin(p.out, at.batch, head, member) + query * p.out.row;
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const int column = column_of<Config>(n);
      if (column >= p.head_dim_v) continue;
      *reinterpret_cast<uint32_t*>(out + column) =
          pack<typename Config::Target, typename Config::T>(
              finish_out(all.out.x[0][n][2 * h], inverse),
              finish_out(all.out.x[0][n][2 * h + 1], inverse));
    }
  }
}

template <class Config>
__device__ __forceinline__ void decode_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int WARPS = Config::WARPS;
  constexpr int STAGES = Config::STAGES;
  constexpr int STAGE_BYTES = Config::BLOCK_N * HEAD_DIM * 2;
  constexpr int WARP_KEYS = Config::BLOCK_N / WARPS;  // of a tile
  constexpr int OT = HEAD_DIM / 8 / WARPS;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sRing = shared_address(smem.ring);
  const uint32_t sQ = shared_address(smem.q);
  const uint32_t sP = shared_address(smem.p);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;

  let_next_start<Target>();
  const DecodeShares<Config::THREADS> shares(p, smem.shares);
  const int own = blockIdx.x;  // share
  const int share_begin = shares.begin(own);
  const int share_end = shares.begin(own + 1);
  if (share_begin == share_end) return;
  DecodeCursor at = shares.find(p, smem.shares, share_begin);
  int units = share_end - share_begin;
  if (!shares.splits) {  // the tasks that begin in this share, as a whole
    __syncthreads();
    const int first = at.unit == at.extent.first ? share_begin : at.task_end();
    const int end = share_end == shares.total ? share_end : [&] {
      const DecodeCursor last = shares.find(p, smem.shares, share_end);
      return last.unit == last.extent.first ? share_end : last.task_end();
    }();
    if (first >= end) return;
    if (first != share_begin) {
      __syncthreads();
      at = shares.find(p, smem.shares, first);
    }
    units = end - first;
  }

  UnitLoader<Config> loader(p, at, units);
  QueryLoader<Config> queries;
  queries.load(p, at.batch, at.task);
  const auto commit = [] {
    if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    loader.fetch(p, sRing + i * STAGE_BYTES);
    commit();
  }
  int stage = 0;
  // The next tile is in; everybody is done with the one before, whose stage is filled again.
  const auto arrive = [&] {
    if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<STAGES - 2>();
    __syncthreads();
    loader.fetch(p, sRing + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE_BYTES);
    commit();
    const uint32_t tile = sRing + stage * STAGE_BYTES;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
    return tile;
  };

  const float scale_log2 = p.softmax_scale * LOG2_E;
  const auto a_q = Operand<HEAD_DIM>::a(sQ);
  const auto a_p = Operand<UNIT_KEYS>::a(sP);
  Partial<OT> task, group, unit;
  TaskRows rows(p, at);

#pragma unroll 1
  for (; units > 0; --units, at.advance(p)) {
    if (at.unit == at.extent.first || at.position == share_begin) {
      queries.store(sQ);
      rows = TaskRows(p, at);
      task.clear();
      group.clear();
    }
    if (at.unit + 1 == at.extent.end) queries.load_next(p, at);

    // S = Q @ K.T                                        [16, 128], WARP_KEYS of a tile per warp
    Accumulator<1, Config::KEY_TILES> s[Config::TILES];
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sK = arrive();
      s[i].clear();
      if constexpr (Config::KEY_TILES == 1) {
        gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, 1, 1>(s[i], a_q, Operand<HEAD_DIM>::b_8(sK),
                                                            warp * WARP_KEYS);
      } else {
        gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, 1, Config::KEY_TILES>(
            s[i], a_q, Operand<HEAD_DIM>::b(sK), warp * WARP_KEYS);
      }
    }

    // Hidden scores are -inf; the greatest of each row
    const int key0 = at.unit * UNIT_KEYS;
    if (!rows.all_see(key0)) {
#pragma unroll
      for (int i = 0; i < Config::TILES; ++i) {
        rows.hide(s[i], key0 + i * Config::BLOCK_N + warp * WARP_KEYS);
      }
    }
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i)
#pragma unroll
      for (int n = 0; n < Config::KEY_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[i].x[0][n][e]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      top[h] = quad_max(top[h]);
      if (lane % 4 == 0) smem.tops[warp][lane / 4 + 8 * h] = top[h];
    }
    __syncthreads();  // tops of all warps
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int w = 0; w < WARPS; ++w) top[h] = fmaxf(top[h], smem.tops[w][lane / 4 + 8 * h]);
      unit.top[h] = __fmul_rn(top[h], scale_log2);
    }

    // P = exp2(S * scale - top), summed and then rounded [16, 128]
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i)
#pragma unroll
      for (int n = 0; n < Config::KEY_TILES; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float offset = unit.top[h] == -INFINITY ? 0.0f : unit.top[h];
          const float left = exp2_approx(fmaf(s[i].x[0][n][2 * h], scale_log2, -offset));
          const float right = exp2_approx(fmaf(s[i].x[0][n][2 * h + 1], scale_log2, -offset));
          sum[h] += left + right;
          const int key = i * Config::BLOCK_N + warp * WARP_KEYS + n * 8;
          store_shared_4(
              sP + SwizzledRows<UNIT_KEYS>::offset(lane / 4 + 8 * h, key / 8) + lane % 4 * 4,
              pack<Target, T>(left, right));
        }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] = quad_sum(sum[h]);
      if (lane % 4 == 0) smem.sums[warp][lane / 4 + 8 * h] = sum[h];
    }

    // O = P @ V                                          [16, HEAD_DIM], HEAD_DIM / WARPS per warp
    unit.out.clear();
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sV = arrive();  // and P and sums of all warps
      const auto b_v = share(Operand<HEAD_DIM>::b_trans(sV), warp);
#pragma unroll
      for (int k = 0; k < Config::BLOCK_N / 16; ++k) {
        uint32_t rP[1][4];
        ldmatrix_x4(rP[0], a_p.at(0, i * (Config::BLOCK_N / 16) + k));
        gemm_ab_step<Target, T, HEAD_DIM, WARPS>(unit.out, rP, b_v, k * 16);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unit.sum[h] = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) unit.sum[h] += smem.sums[w][lane / 4 + 8 * h];
    }

    // Into its group, or to memory where blocks share that
    const int group_begin = at.group_begin();
    const int group_end = at.group_end();
    const bool owns_task =
        !shares.splits || (share_begin <= at.task_begin() && at.task_end() <= share_end);
    if (!owns_task && (group_begin < share_begin || share_end < group_end)) {
      const int64_t record = shares.unit_record(at) + at.unit % GROUP_UNITS;
      store_partial<Config>(p, unit, record);
      continue;
    }
    group.fold(unit);
    if (at.position + 1 < group_end) continue;
    if (owns_task) {
      task.fold(group);
      if (at.unit + 1 == at.extent.end) store_result<Config>(p, task, at);
    } else {
      store_partial<Config>(p, group, shares.group_record(p, at, own));
    }
    group.clear();
  }
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
}

}  // namespace flash_dist

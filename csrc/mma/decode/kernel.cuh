// Attention of few queries to the keys and values of a cache, on mma.sync.
//
// Grid      as many blocks as the GPU holds, each with a share of the units of all sequences
//           (core/decode_work.cuh): the host knows no length.
// Block     WARPS warps on ROWS rows, the queries of all heads of a group, which so share one pass
//           over K and V. Of a unit of 128 keys each warp owns some columns of S, then some of O.
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

// The row of a task that a lane holds as row h of the two of row tile m.
__device__ __forceinline__ int row_in_task(int m, int h) {
  return m * 16 + h * 8 + threadIdx.x % 32 / 4;
}

// O of some keys for the warp's columns, and the rows' statistics.
template <int MT, int OT>
struct Partial {
  Accumulator<MT, OT> out;
  float top[MT][2], sum[MT][2];

  __device__ __forceinline__ void clear() {
    out.clear();
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[m][h] = -INFINITY, sum[m][h] = 0.0f;
  }
  __device__ __forceinline__ void fold(const Partial& later) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Fold fold(top[m][h], later.top[m][h]);
        top[m][h] = fold.top;
        sum[m][h] = fold(sum[m][h], later.sum[m][h]);
#pragma unroll
        for (int n = 0; n < OT; ++n)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            out.x[m][n][e] = fold(out.x[m][n][e], later.out.x[m][n][e]);
          }
      }
  }
};

// The keys that a lane's rows of a task see.
template <int MT>
struct TaskRows {
  int begin[MT][2], end[MT][2];

  __device__ __forceinline__ TaskRows(const DecodeParams& p, const DecodeCursor& at) {
    const int seqlen = at.extent.seqlen;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = at.tile(p) * MT * 16 + row_in_task(m, h);
        const int diagonal = divide(row, p.by_group) + seqlen - p.seqlen_q;
        begin[m][h] = p.left >= UNBOUNDED ? 0 : max(diagonal - p.left, 0);
        end[m][h] = p.right >= UNBOUNDED ? seqlen : min(diagonal + p.right + 1, seqlen);
        if (row >= p.rows) begin[m][h] = 0, end[m][h] = seqlen;  // there is none: it hides nothing
      }
  }

  // The keys that all of them see.
  __device__ __forceinline__ RowSpan common() const {
    RowSpan keys{0, INT32_MAX};
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        keys.first = max(keys.first, begin[m][h]);
        keys.end = min(keys.end, end[m][h]);
      }
    return keys;
  }
  // S of the keys from key0 on.
  template <int NT>
  __device__ __forceinline__ void hide(Accumulator<MT, NT>& s, int key0) const {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = key0 + n * 8 + threadIdx.x % 4 * 2 + e % 2;
          if (key < begin[m][e / 2] || key >= end[m][e / 2]) s.x[m][n][e] = -INFINITY;
        }
  }
};

// The queries of a task on their way through registers: where these suffice, while another task is
// computed.
template <class Config>
struct QueryLoader {
  using Layout = SwizzledRows<Config::HEAD_DIM>;
  static constexpr int CHUNKS = Config::ROWS * Layout::CHUNKS / Config::THREADS;
  static constexpr bool EARLY = Config::ROWS == 16;
  uint4 chunks[CHUNKS];

  __device__ __forceinline__ void load(const DecodeParams& p, int batch, int task) {
    const int tile = divide(task, p.by_heads);
    const int head = task - tile * p.num_heads_kv;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int i = c * Config::THREADS + threadIdx.x;
      const int row = tile * Config::ROWS + i / Layout::CHUNKS, column = i % Layout::CHUNKS * 8;
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

// The first of two neighbouring columns of O that a lane holds in x[m][n]: warps take turns by 16.
template <class Config>
__device__ __forceinline__ int column_of(int n) {
  return (n / 2 * Config::WARPS + threadIdx.x / 32) * 16 + n % 2 * 8 + threadIdx.x % 4 * 2;
}

// A partial result into its place in memory.
template <class Config, int MT, int OT>
__device__ __forceinline__ void store_partial(const DecodeParams& p, const Partial<MT, OT>& part,
                                              int64_t record) {
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_in_task(m, h);
      if (row >= p.tile_rows) continue;
      const int64_t at = record * p.tile_rows + row;
      if (threadIdx.x < 32 && threadIdx.x % 4 == 0) {
        p.partial_stats[at] = {part.top[m][h], part.sum[m][h]};
      }
      float* out = p.partial_out + at * Config::HEAD_DIM;
#pragma unroll
      for (int n = 0; n < OT; ++n) {
        *reinterpret_cast<float2*>(out + column_of<Config>(n)) = {part.out.x[m][n][2 * h],
                                                                  part.out.x[m][n][2 * h + 1]};
      }
    }
}

// out and lse of a task.
template <class Config, int MT, int OT>
__device__ __forceinline__ void store_result(const DecodeParams& p, const Partial<MT, OT>& all,
                                             const DecodeCursor& at) {
  const int head = at.head(p);
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = at.tile(p) * Config::ROWS + row_in_task(m, h);
      if (row >= p.rows) continue;
      const int query = divide(row, p.by_group);
      const int member = row - query * p.group;
      if (threadIdx.x < 32 && threadIdx.x % 4 == 0) {
        p.lse[lse_place(p, at.batch, head, member, query)] =
            finish_lse(all.top[m][h], all.sum[m][h]);
      }
      const float inverse = finish_inverse(all.sum[m][h]);
      uint16_t* out = head_begin(p.out, at.batch, head, member) + query * p.out.row;
#pragma unroll
      for (int n = 0; n < OT; ++n) {
        const int column = column_of<Config>(n);
        if (column >= p.head_dim_v) continue;
        *reinterpret_cast<uint32_t*>(out + column) =
            pack<typename Config::Target, typename Config::T>(
                finish_out(all.out.x[m][n][2 * h], inverse),
                finish_out(all.out.x[m][n][2 * h + 1], inverse));
      }
    }
}

// Where a block's units begin and how many they are: its share, or, where sequences are not split,
// the tasks that begin in it. All threads; the cursor of no unit is not to be used.
template <class Shares>
__device__ __forceinline__ int take_units(const DecodeParams& p, const Shares& shares,
                                          typename Shares::Smem& smem, DecodeCursor& at, int begin,
                                          int end) {
  if (shares.splits) return end - begin;
  const auto whole = [&](const DecodeCursor& cursor) {
    return cursor.unit == cursor.extent.first ? cursor.position : cursor.task_end();
  };
  const int first = whole(at);
  __syncthreads();
  const int last = end == shares.total ? end : whole(shares.find(p, smem, end));
  __syncthreads();
  if (first < last) at = shares.find(p, smem, first);
  return last - first;
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
  constexpr int MT = Config::ROWS / 16;
  constexpr int NT = Config::KEY_TILES;
  constexpr int OT = HEAD_DIM / 8 / WARPS;
  constexpr uint32_t ONES = std::is_same_v<T, Bf16> ? 0x3f803f80u : 0x3c003c00u;

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
  int units = take_units(p, shares, smem.shares, at, share_begin, share_end);
  if (units <= 0) return;

  UnitLoader<Config> loader(p, at, units);
  QueryLoader<Config> queries;
  if constexpr (queries.EARLY) queries.load(p, at.batch, at.task);
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
  RowSpan seen{0, 0};  // by all of this lane's rows
  Partial<MT, OT> task, group, unit;

#pragma unroll 1
  for (; units > 0; --units, at.advance(p)) {
    if (at.unit == at.extent.first || at.position == share_begin) {
      if constexpr (!queries.EARLY) queries.load(p, at.batch, at.task);
      queries.store(sQ);
      seen = TaskRows<MT>(p, at).common();
      task.clear();
      group.clear();
    }
    if (queries.EARLY && at.unit + 1 == at.extent.end) queries.load_next(p, at);

    // S = Q @ K.T                                      [ROWS, 128], WARP_KEYS of a tile per warp
    Accumulator<MT, NT> s[Config::TILES];
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sK = arrive();
      s[i].clear();
      const auto b_k = NT == 1 ? Operand<HEAD_DIM>::b_8(sK) : Operand<HEAD_DIM>::b(sK);
      gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, MT, NT>(s[i], a_q, b_k, warp * WARP_KEYS);
    }

    // Hidden scores are -inf; the greatest of each row
    const int key0 = at.unit * UNIT_KEYS;
    if (__any_sync(0xffffffffu, key0 < seen.first || seen.end < key0 + UNIT_KEYS)) {
      const TaskRows<MT> rows(p, at);
#pragma unroll
      for (int i = 0; i < Config::TILES; ++i) {
        rows.hide(s[i], key0 + i * Config::BLOCK_N + warp * WARP_KEYS);
      }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < Config::TILES; ++i)
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            top = fmaxf(top, fmaxf(s[i].x[m][n][2 * h], s[i].x[m][n][2 * h + 1]));
          }
        top = quad_max(top);
        if (lane % 4 == 0) smem.tops[warp][row_in_task(m, h)] = top;
      }
    __syncthreads();  // tops of all warps

    // P = exp2(S * scale - top), rounded               [ROWS, 128]
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = -INFINITY;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, smem.tops[w][row_in_task(m, h)]);
        unit.top[m][h] = __fmul_rn(top, scale_log2);
        const float offset = top == -INFINITY ? 0.0f : unit.top[m][h];
#pragma unroll
        for (int i = 0; i < Config::TILES; ++i)
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            const float left = exp2_approx(fmaf(s[i].x[m][n][2 * h], scale_log2, -offset));
            const float right = exp2_approx(fmaf(s[i].x[m][n][2 * h + 1], scale_log2, -offset));
            const int key = i * Config::BLOCK_N + warp * WARP_KEYS + n * 8;
            store_shared_4(
                sP + SwizzledRows<UNIT_KEYS>::offset(row_in_task(m, h), key / 8) + lane % 4 * 4,
                pack<Target, T>(left, right));
          }
      }

    // O = P @ V and the sum, P @ 1                     [ROWS, HEAD_DIM], HEAD_DIM / WARPS per warp
    unit.out.clear();
    float sums[MT][4] = {};
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sV = arrive();  // and P of all warps
      const auto b_v = share(Operand<HEAD_DIM>::b_trans(sV), warp);
#pragma unroll
      for (int k = 0; k < Config::BLOCK_N / 16; ++k) {
        uint32_t rP[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          ldmatrix_x4(rP[m], a_p.at(m * 16, i * (Config::BLOCK_N / 16) + k));
          mma_m16n8k16<Target, T>(sums[m], rP[m], ONES, ONES);
        }
        gemm_ab_step<Target, T, HEAD_DIM, WARPS>(unit.out, rP, b_v, k * 16);
      }
    }
#pragma unroll
    for (int m = 0; m < MT; ++m) unit.sum[m][0] = sums[m][0], unit.sum[m][1] = sums[m][2];

    // Into its group, or to memory where blocks share that
    const int group_begin = at.group_begin();
    const int group_end = at.group_end();
    const bool owns_task =
        !shares.splits || (share_begin <= at.task_begin() && at.task_end() <= share_end);
    if (!owns_task && (group_begin < share_begin || share_end < group_end)) {
      store_partial<Config>(p, unit, shares.unit_record(at) + at.unit % GROUP_UNITS);
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

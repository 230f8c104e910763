// Attention of few queries to the keys and values of a cache, on mma.sync.
//
// Grid      as many blocks as the GPU holds, each with a share of the units of all sequences
//           (core/decode_work.cuh): the host knows no length.
// Block     WARPS warps on TASK_ROWS rows, the queries of all heads of a group, which so share one pass
//           over K and V: SPLIT of them on 16 rows. Of a unit of 128 keys each warp owns some columns
//           of S, then some of O. With many queries a block takes more rows, to the same bits.
// Shared    a ring of tiles of K and V, Q, P.
// Pipeline  all but one stage of the ring are on their way; a unit's tiles of K, then those of V,
//           then the next unit's, of whatever task.
//
// Each unit has a softmax of its own, from nothing. Fold puts the units of a group together and the
// groups of a task; what of it other blocks have is stored, and folded by core/decode_fold.h in the
// same way.
#pragma once

#include "core/decode_load.cuh"
#include "core/decode_rows.cuh"
#include "core/decode_scores.cuh"
#include "core/softmax.cuh"
#include "mma/decode/config.h"
#include "mma/fragments.cuh"
#include "ptx/dependents.cuh"

namespace flash_dist {

// What a warp that owns rows has of a task, out of the way and back.
template <class Config, int OT>
__device__ __forceinline__ void park(typename Config::Parked& parked, const Partial<OT>& task) {
#pragma unroll
  for (int n = 0; n < OT; ++n) {
    const float (&x)[4] = task.out.x[0][n];
    parked.out[n][threadIdx.x] = {x[0], x[1], x[2], x[3]};
  }
  parked.stats[threadIdx.x] = {task.top[0], task.top[1], task.sum[0], task.sum[1]};
}
template <class Config, int OT>
__device__ __forceinline__ Partial<OT> unpark(const typename Config::Parked& parked) {
  Partial<OT> task;
#pragma unroll
  for (int n = 0; n < OT; ++n) {
    const float4 x = parked.out[n][threadIdx.x];
    float (&own)[4] = task.out.x[0][n];
    own[0] = x.x, own[1] = x.y, own[2] = x.z, own[3] = x.w;
  }
  const float4 stats = parked.stats[threadIdx.x];
  task.top[0] = stats.x, task.top[1] = stats.y, task.sum[0] = stats.z, task.sum[1] = stats.w;
  return task;
}

template <class Config>
__device__ __forceinline__ void decode_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int SPLIT = Config::SPLIT;
  constexpr int STAGES = Config::STAGES;
  constexpr int STAGE_BYTES = Config::BLOCK_N * HEAD_DIM * 2;
  constexpr int WARP_KEYS = Config::BLOCK_N / SPLIT;  // of a tile
  constexpr int WARP_PARTS = Config::PARTS / SPLIT;
  constexpr int KEY_STEPS = Config::BLOCK_N / 16;  // of P @ V in a tile
  constexpr int OT = HEAD_DIM / 8 / SPLIT;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sRing = shared_address(smem.ring);
  const uint32_t sQ = shared_address(smem.q);
  const WarpPlace<Config> own;
  const int lane = threadIdx.x % 32;

  let_next_start<Target>();
  if (p.packing.cu_seqlens_q != nullptr && !p.few_alone) fill_uncovered<Config>(p);
  const DecodeShares<Config::THREADS> shares(p, smem.shares);
  const int share = blockIdx.x;
  int share_begin, share_end;
  DecodeCursor first;
  if (!shares.find_share(p, smem.shares, share, first, share_begin, share_end)) return;
  int units = share_end - share_begin;
  if (threadIdx.x == 0) smem.share_begin = share_begin, smem.share_end = share_end;

  // Where this warp is, and the loader: in shared memory they take no registers meanwhile.
  auto& kept = smem.cursors[threadIdx.x / 32];
  DecodeCursor& at = Config::KEEPS_CURSORS ? kept.computed : first;
  if constexpr (Config::KEEPS_CURSORS) {
    set_cursor(kept.computed, first);
    set_cursor(kept.loaded, first);
  }
  const auto advance = [&] {
    if constexpr (Config::KEEPS_CURSORS) {
      advance_kept(p, at);
    } else {
      at.advance(p);
    }
  };
  UnitLoader<Config> loader(p, Config::KEEPS_CURSORS ? kept.loaded : first, units);
  QueryLoader<Config> queries;
  if constexpr (!Config::LOADS_LATE) queries.load(p, first);
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

  const float scale_log2 = p.scores.scale * LOG2_E;
  const uint32_t sP = shared_address(smem.exchange.p) + own.row0 * UNIT_KEYS * 2;
  const auto a_q = Operand<HEAD_DIM>::a(sQ + own.row0 * HEAD_DIM * 2);
  const auto a_p = Operand<UNIT_KEYS>::a(sP);
  Partial<OT> task, group, unit;
  // Keys that both of the lane's rows see; what they see of a unit with others is found out there.
  int2 clear{};

  bool is_first = true;
#pragma unroll 1
  for (; units > 0; --units, advance()) {
    if (at.unit == at.extent.first || is_first) {
      is_first = false;
      if constexpr (Config::LOADS_LATE) queries.load(p, at);
      queries.store(sQ);
      clear = TaskRows(p, at, own).clear();
      task.clear();
      group.clear();
      if constexpr (Config::OWNS_ROWS) park<Config>(smem.parked, task);
    }
    if (!Config::LOADS_LATE && at.unit + 1 == at.extent.end && units > 1) {
      DecodeCursor next = at;
      next.advance(p);
      queries.load(p, next);
    }

    // S = Q @ K.T                                        [16, WARP_KEYS] of each tile per warp
    Accumulator<1, Config::KEY_TILES> s[Config::TILES];
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sK = arrive();
      s[i].clear();
      if constexpr (Config::KEY_TILES == 1) {
        gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, 1, 1>(s[i], a_q, Operand<HEAD_DIM>::b_8(sK),
                                                            own.part * WARP_KEYS);
      } else {
        gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, 1, Config::KEY_TILES>(
            s[i], a_q, Operand<HEAD_DIM>::b(sK), own.part * WARP_KEYS);
      }
    }

    // Soft cap and ALiBi; hidden scores are -inf; the greatest of each row
    const int key0 = at.unit * UNIT_KEYS;
    if (p.scores.bends) {
      const TaskScores scores(p, at, own);
#pragma unroll
      for (int i = 0; i < Config::TILES; ++i) {
        scores.bend(s[i], p, key0 + i * Config::BLOCK_N + own.part * WARP_KEYS);
      }
    }
    if (!TaskRows::all_clear(clear, key0)) {
      const TaskRows rows(p, at, own);
#pragma unroll
      for (int i = 0; i < Config::TILES; ++i) {
        rows.hide(s[i], key0 + i * Config::BLOCK_N + own.part * WARP_KEYS);
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
      if (!Config::OWNS_ROWS && lane % 4 == 0) smem.exchange.tops[own.part][own.row(h)] = top[h];
    }
    if constexpr (!Config::OWNS_ROWS) {
      __syncthreads();  // tops of all warps
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int w = 0; w < SPLIT; ++w) {
          top[h] = fmaxf(top[h], smem.exchange.tops[w][own.row(h)]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) unit.top[h] = __fmul_rn(top[h], scale_log2);

    // P = exp2(S * scale - top), summed and then rounded [16, WARP_KEYS] of each tile per warp
    float sum[WARP_PARTS][2] = {};
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i)
#pragma unroll
      for (int n = 0; n < Config::KEY_TILES; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float offset = unit.top[h] == -INFINITY ? 0.0f : unit.top[h];
          float& left = s[i].x[0][n][2 * h];
          float& right = s[i].x[0][n][2 * h + 1];
          left = exp2_approx(fmaf(left, scale_log2, -offset));
          right = exp2_approx(fmaf(right, scale_log2, -offset));
          sum[n * WARP_PARTS / Config::KEY_TILES][h] += left + right;
          if constexpr (!Config::OWNS_ROWS) {
            const int key = i * Config::BLOCK_N + own.part * WARP_KEYS + n * 8;
            store_shared_4(
                sP + SwizzledRows<UNIT_KEYS>::offset(lane / 4 + 8 * h, key / 8) + lane % 4 * 4,
                pack<Target, T>(left, right));
          }
        }
#pragma unroll
    for (int i = 0; i < WARP_PARTS; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[i][h] = quad_sum(sum[i][h]);
        if (!Config::OWNS_ROWS && lane % 4 == 0) {
          smem.exchange.sums[own.part * WARP_PARTS + i][own.row(h)] = sum[i][h];
        }
      }

    uint32_t rP[Config::OWNS_ROWS ? UNIT_KEYS / 16 : 1][1][4];
    if constexpr (Config::OWNS_ROWS) {
#pragma unroll
      for (int i = 0; i < Config::TILES; ++i)
#pragma unroll
        for (int k = 0; k < KEY_STEPS; ++k) {
          to_a_operand<Target, T>(rP[i * KEY_STEPS + k], s[i], k);
        }
    }

    // O = P @ V                                          [16, HEAD_DIM / SPLIT] per warp
    unit.out.clear();
#pragma unroll
    for (int i = 0; i < Config::TILES; ++i) {
      const uint32_t sV = arrive();  // and P and sums of all warps
      const auto b_v = flash_dist::share(Operand<HEAD_DIM>::b_trans(sV), own.part);
#pragma unroll
      for (int k = 0; k < KEY_STEPS; ++k) {
        uint32_t (&step)[1][4] = rP[Config::OWNS_ROWS ? i * KEY_STEPS + k : 0];
        if constexpr (!Config::OWNS_ROWS) ldmatrix_x4(step[0], a_p.at(0, i * KEY_STEPS + k));
        gemm_ab_step<Target, T, HEAD_DIM, SPLIT>(unit.out, step, b_v, k * 16);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      unit.sum[h] = 0.0f;
#pragma unroll
      for (int i = 0; i < Config::PARTS; ++i) {
        if constexpr (Config::OWNS_ROWS) {
          unit.sum[h] += sum[i][h];
        } else {
          unit.sum[h] += smem.exchange.sums[i][own.row(h)];
        }
      }
    }

    // Into its group, or to memory where blocks share that
    const int group_begin = at.group_begin();
    const int group_end = at.group_end();
    const int2 bounds{smem.share_begin, smem.share_end};
    const bool owns_task = bounds.x <= at.task_begin() && at.task_end() <= bounds.y;
    if (!owns_task && (group_begin < bounds.x || bounds.y < group_end)) {
      const int64_t record = shares.part_record(p, at) + at.unit % GROUP_UNITS;
      store_partial(p, unit, record, own);
      continue;
    }
    group.fold(unit);
    if (at.position + 1 < group_end) continue;
    if (owns_task) {
      if constexpr (Config::OWNS_ROWS) task = unpark<Config, OT>(smem.parked);
      task.fold(group);
      if constexpr (Config::OWNS_ROWS) park<Config>(smem.parked, task);
      if (at.unit + 1 == at.extent.end) store_result(p, task, at, own);
    } else {
      store_partial(p, group, shares.group_record(p, at, share), own);
    }
    group.clear();
  }
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
}

}  // namespace flash_dist

// dK and dV, and dS for the dQ product: the key side of the backward. No atomics: a block owns its
// keys.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// Grid      x = key tile, (batch, kv head) unit of the chunk, group split.
// Block     SPLIT = 1: a warp owns ROWS keys over the whole head_dim; P^T and dS^T stay in its
//           registers as A operands. SPLIT > 1 (dK and dV of a whole row would take all registers):
//           SPLIT warps own ROWS keys; each computes S^T and dP^T for its part of the stage's
//           queries, exchanges P^T and dS^T through shared memory, and accumulates its part of the
//           columns.
// Shared    K and V (for the whole life of the block), STAGES stages of Q, dO, lse and delta.
// Pipeline  the query tiles of every query head of the split, in ascending order: this is the order
//           of summation.
#pragma once

#include "core/blocks.cuh"
#include "core/hide.cuh"
#include "core/pipeline.cuh"
#include "core/statistics.cuh"
#include "core/views.cuh"
#include "mma/bwd/config.h"
#include "mma/bwd/store.cuh"
#include "mma/fragments.cuh"
#include "ptx/barrier.cuh"

namespace flash_dist {

// fp32 rows of a warp's accumulator, for the partial sums of the group split.
template <int SPLIT, int MT, int NT>
__device__ __forceinline__ void store_partial(const Accumulator<MT, NT>& c, float* dst,
                                              int row_limit, int part) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = m * 16 + h * 8 + lane / 4;
      if (row < row_limit) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int column = (n / 2 * SPLIT + part) * 16 + n % 2 * 8 + (lane % 4) * 2;
          *reinterpret_cast<float2*>(dst + row * (NT * 8 * SPLIT) + column) =
              float2{c.x[m][n][2 * h], c.x[m][n][2 * h + 1]};
        }
      }
    }
}

template <class Config>
__device__ __forceinline__ void dkdv_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int SPLIT = Config::SPLIT;
  constexpr int MT = Config::ROW_TILES;
  constexpr int SUB_M = Config::SUB_M;
  constexpr int NT = Config::QUERIES / 8;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sK = shared_address(smem.k);
  const uint32_t sV = shared_address(smem.v);
  const uint32_t sStage = shared_address(&smem.stage[0]);
  using Stage = typename Config::Stage;
  const auto sQ = [&](int s) { return sStage + s * static_cast<int>(sizeof(Stage)); };
  const auto sDout = [&](int s) { return sQ(s) + static_cast<int>(offsetof(Stage, dout)); };
  const auto sLse = [&](int s) { return sQ(s) + static_cast<int>(offsetof(Stage, lse_log2)); };
  const auto sDelta = [&](int s) { return sQ(s) + static_cast<int>(offsetof(Stage, delta)); };

  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int part = warp % SPLIT;
  const int warp_row0 = warp / SPLIT * Config::ROWS;
  const int tile_half = warp_row0 / DS_TILE;  // which of the block's key tiles of the mask

  DkdvWork& work = smem.work;
  RowSpan keys;
  {
    const DkdvBlock block(p, BLOCK_N);
    const Sequence sequence(p, block.batch);
    if (block.key0 >= sequence.seqlen_k) return;
    const int members = p.group / p.group_split;
    const int head = block.head_kv * p.group;
    const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch, head + block.split * members));
    keys = mask.keys_that_exist(block.batch);
    if (threadIdx.x == 0) {
      const DsLayout layout = ds_layout(p, sequence);
      const QueryWalk<BLOCK_N> walk(mask, layout, block.key0);
      const int first = p.key_begin / DS_TILE;
      const int n = block.key0 / DS_TILE;
      work.q = head_begin(p.q, block.batch, block.head_kv, 0) + sequence.q0 * p.q.row;
      work.dout = head_begin(p.dout, block.batch, block.head_kv, 0) + sequence.q0 * p.dout.row;
      work.statistics = statistics_begin(p, block.batch, head, sequence.q0);
      work.entries = walk.entries;
      work.begin = walk.begin;
      work.end = walk.end;
      work.batch = block.batch;
      work.head = head;
      work.members_begin = block.split * members;
      work.members_end = block.split * members + members;
      work.seqlen_q = sequence.seqlen_q;
      work.seqlen_k = sequence.seqlen_k;
      work.key0 = block.key0;
      const Mask mask0 = DkdvCursor<Config>::mask_of(p, work, 0);
      const int slot0 = block.unit * p.group * static_cast<int>(p.ds_tiles_per_head);
      for (int half = 0; half < (BLOCK_N > MASK_TILE ? 2 : 1); ++half) {
        work.slot0[half] = slot0 + (mask.is_list() ? -p.mask.key_slots[first]
                                                   : slot_base(mask0, layout, first, n + half));
        if (p.mask.kind == MaskKind::BAND) work.tiles[half] = band_tiles(mask, layout, n + half);
      }
    }

    TileCopy<Target, BLOCK_N, HEAD_DIM, Config::THREADS> copy_k;
    const RowSpan here{keys.first - block.key0, keys.end - block.key0};
    copy_k.fetch(
        sK, head_begin(p.k, block.batch, block.head_kv, 0) + (sequence.k0 + block.key0) * p.k.row,
        p.k.row, here, p.head_dim);
    copy_k.land(sK);
    TileCopy<Target, BLOCK_N, HEAD_DIM_V, Config::THREADS> copy_v;
    copy_v.fetch(
        sV, head_begin(p.v, block.batch, block.head_kv, 0) + (sequence.k0 + block.key0) * p.v.row,
        p.v.row, here, p.head_dim_v);
    copy_v.land(sV);
    __syncthreads();  // work is there
  }

  TileCopy<Target, BLOCK_M, HEAD_DIM, Config::THREADS> copy_q;
  TileCopy<Target, BLOCK_M, HEAD_DIM_V, Config::THREADS> copy_dout;
  StatCopy<Target, BLOCK_M> copy_stats;
  DkdvCursor<Config> cursor(p, work);
  DkdvItem staged_item;  // thread 0's, where copies are staged in registers
  const auto fetch = [&](int, int s) {
    const int row0 = cursor.row0();
    const RowSpan rows{0, work.seqlen_q - row0};
    copy_q.fetch(sQ(s), work.q + cursor.member * p.q.head_group + row0 * p.q.row, p.q.row, rows,
                 p.head_dim);
    copy_dout.fetch(sDout(s), work.dout + cursor.member * p.dout.head_group + row0 * p.dout.row,
                    p.dout.row, rows, p.head_dim_v);
    const int64_t row =
        work.statistics + static_cast<int64_t>(cursor.member) * p.rows_padded + row0;
    copy_stats.fetch(sLse(s), p.lse_log2 + row, p.delta + row);
    if (threadIdx.x == 0) {
      DkdvItem& item = Target::HAS_CP_ASYNC ? smem.stage[s].item : staged_item;
      item.row0 = row0;
      item.member = cursor.member;
      item.slot[0] = cursor.slot(p, work, 0);
      if (BLOCK_N > MASK_TILE) item.slot[1] = cursor.slot(p, work, 1);
      const int4* known = cursor.known(p, work);
      if (known != nullptr) {
        if constexpr (Target::HAS_CP_ASYNC) {
          cp_async_16(shared_address(&item.known), known, true);
        } else {
          item.known = *known;
        }
      }
    }
    __syncwarp();
    cursor.next(p, work);
  };
  const auto land = [&](int s) {
    copy_q.land(sQ(s));
    copy_dout.land(sDout(s));
    copy_stats.land(sLse(s));
    if constexpr (!Target::HAS_CP_ASYNC) {
      if (threadIdx.x == 0) smem.stage[s].item = staged_item;
    }
  };

  Accumulator<MT, HEAD_DIM / 8 / SPLIT> dk;
  Accumulator<MT, HEAD_DIM_V / 8 / SPLIT> dv;
  dk.clear();
  dv.clear();
  const float scale_log2 = p.softmax_scale * LOG2_E;

  const auto compute = [&](int, int s) {
    const DkdvItem& item = smem.stage[s].item;
    const int code = tile_code(p, work, item, tile_half);
    if (code == TILE_EMPTY) {  // for all warps that share these keys
      // No result needs this: the stage's barrier separates the teams. But where only some of them
      // come to theirs, compute-sanitizer's racecheck reports hazards between stages.
      if constexpr (SPLIT > 1 && BLOCK_N > MASK_TILE) barrier_sync(1 + warp / SPLIT, 32 * SPLIT);
      return;
    }
    const int slot = item.slot[tile_half];
    const int row0 = item.row0;
    const auto a_k = Operand<HEAD_DIM>::a(sK + warp_row0 * HEAD_DIM * 2);
    const auto a_v = Operand<HEAD_DIM_V>::a(sV + warp_row0 * HEAD_DIM_V * 2);
    const auto b_q = [&] {
      return NT == 1 ? Operand<HEAD_DIM>::b_8(sQ(s)) : Operand<HEAD_DIM>::b(sQ(s));
    };
    const auto b_dout = [&] {
      return NT == 1 ? Operand<HEAD_DIM_V>::b_8(sDout(s)) : Operand<HEAD_DIM_V>::b(sDout(s));
    };
#pragma unroll 1
    for (int sub = part * Config::QUERIES; sub < BLOCK_M; sub += SUB_M) {
      // S^T = K @ Q.T                                    [ROWS, QUERIES] per warp
      Accumulator<MT, NT> pt;
      pt.clear();
      gemm_abt<Target, T, HEAD_DIM, Config::UNROLL_S, MT, NT>(pt, a_k, b_q(), sub);
      if (code != TILE_FULL) {
        hide_transposed(pt, DkdvCursor<Config>::mask_of(p, work, item.member), row0 + sub,
                        work.key0 + warp_row0, code);
      }
      // P^T = exp2(S^T * scale - lse)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 lse = load_shared_8(sLse(s) + (sub + n * 8 + (lane % 4) * 2) * 4);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            pt.x[m][n][2 * h] = exp2_approx(fmaf(pt.x[m][n][2 * h], scale_log2, -lse.x));
            pt.x[m][n][2 * h + 1] = exp2_approx(fmaf(pt.x[m][n][2 * h + 1], scale_log2, -lse.y));
          }
      }
      if constexpr (SPLIT == 1) {
        // dV += P^T @ dO                                 [ROWS, HEAD_DIM_V]
#pragma unroll
        for (int k = 0; k < SUB_M / 16; ++k) {
          uint32_t rP[MT][4];
          to_a_operand<Target, T>(rP, pt, k);
          gemm_ab_step<Target, T, HEAD_DIM_V>(dv, rP, Operand<HEAD_DIM_V>::b_trans(sDout(s)),
                                              sub + k * 16);
        }
      }
      // dP^T = V @ dO.T                                  [ROWS, QUERIES]
      Accumulator<MT, NT> dpt;
      dpt.clear();
      gemm_abt<Target, T, HEAD_DIM_V, Config::UNROLL_DP, MT, NT>(dpt, a_v, b_dout(), sub);
      // dS^T = P^T * (dP^T - delta)
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 delta = load_shared_8(sDelta(s) + (sub + n * 8 + (lane % 4) * 2) * 4);
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            dpt.x[m][n][2 * h] = pt.x[m][n][2 * h] * (dpt.x[m][n][2 * h] - delta.x);
            dpt.x[m][n][2 * h + 1] = pt.x[m][n][2 * h + 1] * (dpt.x[m][n][2 * h + 1] - delta.y);
          }
      }
      // A fragment (m, k) of this warp's keys and the stage's queries 16 * k: in the workspace a
      // tile is 4 x 4 of them.
      uint8_t* gDs =
          static_cast<uint8_t*>(p.ds) + static_cast<int64_t>(slot) * DS_TILE_BYTES +
          ((work.key0 + warp_row0) % DS_TILE / 16 * 4 + row0 % DS_TILE / 16) * DS_BLOCK_BYTES +
          lane * 16;
      if constexpr (SPLIT == 1) {
        // dS^T to the workspace; dK += dS^T @ Q          [ROWS, HEAD_DIM]
#pragma unroll
        for (int k = 0; k < SUB_M / 16; ++k) {
          uint32_t rDs[MT][4];
          to_a_operand<Target, T>(rDs, dpt, k);
          if (slot >= 0) {
#pragma unroll
            for (int m = 0; m < MT; ++m) {
              store_global_16(gDs + (m * 4 + sub / 16 + k) * DS_BLOCK_BYTES,
                              {rDs[m][0], rDs[m][1], rDs[m][2], rDs[m][3]});
            }
          }
          gemm_ab_step<Target, T, HEAD_DIM>(dk, rDs, Operand<HEAD_DIM>::b_trans(sQ(s)),
                                            sub + k * 16);
        }
      } else {
        constexpr int BLOCKS = BLOCK_M / 16;
        const int team = warp / SPLIT;
        const int offset = team * MT * BLOCKS * FRAGMENT_BYTES + lane * 16;
        const uint32_t sP = shared_address(smem.p) + offset;
        const uint32_t sDs = shared_address(smem.ds) + offset;
        put_fragments<Target, T, BLOCKS>(sP, pt, part);
        put_fragments<Target, T, BLOCKS>(sDs, dpt, part);
        barrier_sync(1 + team, 32 * SPLIT);  // the team's are there; the stage's barrier frees them
        // dV += P^T @ dO, dK += dS^T @ Q                 [ROWS, HEAD_DIM / SPLIT]
        const auto b_dv = share(Operand<HEAD_DIM_V>::b_trans(sDout(s)), part);
        const auto b_dk = share(Operand<HEAD_DIM>::b_trans(sQ(s)), part);
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
          uint32_t rP[MT][4];
#pragma unroll
          for (int m = 0; m < MT; ++m) get_fragment(rP[m], sP + (m * BLOCKS + k) * FRAGMENT_BYTES);
          gemm_ab_step<Target, T, HEAD_DIM_V, SPLIT>(dv, rP, b_dv, k * 16);
        }
#pragma unroll
        for (int k = 0; k < BLOCKS; ++k) {
          uint32_t rDs[MT][4];
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            get_fragment(rDs[m], sDs + (m * BLOCKS + k) * FRAGMENT_BYTES);
            if (slot >= 0 && k % SPLIT == part) {
              store_global_16(gDs + (m * 4 + k) * DS_BLOCK_BYTES,
                              {rDs[m][0], rDs[m][1], rDs[m][2], rDs[m][3]});
            }
          }
          gemm_ab_step<Target, T, HEAD_DIM, SPLIT>(dk, rDs, b_dk, k * 16);
        }
      }
    }
  };

  run_pipeline<Target, Config::STAGES>(DkdvCursor<Config>::count(p, work), fetch, land, compute);
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  __syncthreads();  // everybody is done with K and V; without a stage they may still be arriving

  const DkdvBlock again(p, BLOCK_N);
  const Sequence sequence(p, again.batch);
  const int row0 = again.key0 + warp_row0;
  const int limit = sequence.seqlen_k - row0;
  if (p.group_split > 1) {
    const int64_t units = static_cast<int64_t>(p.batch) * p.num_heads_kv;
    const int64_t row = (again.split * units + p.unit_begin + again.unit) * p.seqlen_k + row0;
    store_partial<SPLIT>(dk, p.dk_partial + row * HEAD_DIM, limit, part);
    store_partial<SPLIT>(dv, p.dv_partial + row * HEAD_DIM_V, limit, part);
  } else {
    dk.scale(p.softmax_scale);
    store_gradient<Config, HEAD_DIM>(
        dk, sK + warp_row0 * HEAD_DIM * 2, part,
        head_begin(p.dk, again.batch, again.head_kv, 0) + (sequence.k0 + row0) * p.dk.row, p.dk.row,
        limit, p.head_dim);
    store_gradient<Config, HEAD_DIM_V>(
        dv, sV + warp_row0 * HEAD_DIM_V * 2, part,
        head_begin(p.dv, again.batch, again.head_kv, 0) + (sequence.k0 + row0) * p.dv.row, p.dv.row,
        limit, p.head_dim_v);
  }
}

}  // namespace flash_dist

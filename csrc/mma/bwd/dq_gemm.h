// dQ = dS @ K from the spilled dS: a product over the key tiles that the chunk holds and this
// block's queries can see.
//
// Grid      x = query tile, query head of the chunk's units.
// Block     WARPS warps, each owning ROWS queries over the whole head_dim.
// Shared    STAGES stages of one 64-key tile of K and the dS tiles of the block's queries.
// The stored fragments are those of dS^T; transposing their four 8x8 tiles in registers gives the A
// operand of dS.
#pragma once

#include "core/ds_layout.h"
#include "core/entry.h"
#include "core/pipeline.cuh"
#include "core/views.cuh"
#include "mma/bwd/config.h"
#include "mma/bwd/dq_block.cuh"
#include "mma/fragments.cuh"

namespace flash_dist {

// The dS tiles of DS_TILES neighbouring query tiles, copied as they lie; tiles without a slot
// become zero.
template <class Config>
struct DsCopy {
  using Target = typename Config::Target;
  static constexpr int PASSES = DS_TILE_BYTES / 16 / Config::THREADS;
  uint4 staged[Target::HAS_CP_ASYNC ? 1 : Config::DS_TILES * PASSES];

  __device__ __forceinline__ void fetch(uint32_t smem, const uint8_t* first_tile,
                                        int tiles_without_slot, int tiles) {
    const int thread = fresh_thread();
#pragma unroll
    for (int t = 0; t < Config::DS_TILES; ++t)
#pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        const int offset = t * DS_TILE_BYTES + (i * Config::THREADS + thread) * 16;
        const bool valid = t >= tiles_without_slot && t < tiles;
        if constexpr (Target::HAS_CP_ASYNC) {
          cp_async_16(smem + offset, first_tile + offset, valid);
        } else {
          staged[t * PASSES + i] = valid ? load_global_16(first_tile + offset) : uint4{0, 0, 0, 0};
        }
      }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (!Target::HAS_CP_ASYNC) {
      const int thread = fresh_thread();
#pragma unroll
      for (int i = 0; i < Config::DS_TILES * PASSES; ++i) {
        store_shared_16(smem + (i * Config::THREADS + thread) * 16, staged[i]);
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void dq_gemm_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  constexpr int HEAD_DIM = Config::HEAD_DIM;
  constexpr int BLOCK_M = Config::BLOCK_M;
  constexpr int MT = Config::ROW_TILES;

  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  using Stage = typename Config::Stage;
  const uint32_t sStage = shared_address(&smem.stage[0]);
  const auto sK = [&](int s) { return sStage + s * static_cast<int>(sizeof(Stage)); };
  const auto sDs = [&](int s) { return sK(s) + static_cast<int>(offsetof(Stage, ds)); };

  const DqBlock block(p, BLOCK_M);
  const int warp_row0 = (threadIdx.x / 32) * Config::ROWS;
  const int lane = threadIdx.x % 32;

  const DsLayout layout(p.seqlen_q, p.seqlen_k, p.causal);
  const int query_tile0 = block.row0 / DS_TILE;
  const int query_tiles = min(Config::DS_TILES, layout.query_tiles - query_tile0);
  const int key_tile0 = p.key_begin / DS_TILE;
  const int key_tile_end =
      min((p.key_end + DS_TILE - 1) / DS_TILE, query_tile0 + query_tiles + layout.shift);
  const uint8_t* gDs =
      static_cast<const uint8_t*>(p.ds) + block.head * p.ds_tiles_per_head * DS_TILE_BYTES;
  const uint16_t* gK = head_begin(p.k, block.batch, block.head_kv, 0);

  TileCopy<Target, DS_TILE, HEAD_DIM, Config::THREADS> copy_k;
  DsCopy<Config> copy_ds;
  const auto fetch = [&](int i, int s) {
    const int n = key_tile0 + i;
    copy_k.fetch(sK(s), gK + static_cast<int64_t>(n) * DS_TILE * p.k.row, p.k.row,
                 p.seqlen_k - n * DS_TILE);
    const int begin = layout.query_begin(n);
    const int64_t slot = layout.slots(key_tile0, n) + query_tile0 - begin;
    copy_ds.fetch(sDs(s), gDs + slot * DS_TILE_BYTES, begin - query_tile0, query_tiles);
  };
  const auto land = [&](int s) {
    copy_k.land(sK(s));
    copy_ds.land(sDs(s));
  };

  Accumulator<MT, HEAD_DIM / 8> dq;
  dq.clear();
  const auto compute = [&](int, int s) {
    // dQ += dS @ K                                       [ROWS, HEAD_DIM] per warp, 16 keys at a
    // time
    const Operand<HEAD_DIM> b_k = Operand<HEAD_DIM>::b_trans(sK(s));
    const uint32_t ds = sDs(s) + warp_row0 / DS_TILE * DS_TILE_BYTES +
                        warp_row0 % DS_TILE / 16 * DS_BLOCK_BYTES + lane * 16;
#pragma unroll
    for (int k = 0; k < DS_TILE / 16; ++k) {
      uint32_t rDs[MT][4];
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint4 t = load_shared_16(ds + (k * 4 + m) * DS_BLOCK_BYTES);
        rDs[m][0] = movmatrix_trans(t.x);
        rDs[m][1] = movmatrix_trans(t.z);
        rDs[m][2] = movmatrix_trans(t.y);
        rDs[m][3] = movmatrix_trans(t.w);
      }
      gemm_ab_step<Target, T, HEAD_DIM, MT>(dq, rDs, b_k, k * 16);
    }
  };
  run_pipeline<Target, Config::STAGES>(max(key_tile_end - key_tile0, 0), fetch, land, compute);

  if (p.dq_accum != nullptr) {
    float* accum =
        p.dq_accum +
        (static_cast<int64_t>(block.head) * p.rows_padded + block.row0 + warp_row0) * HEAD_DIM;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < HEAD_DIM / 8; ++n) {
          float2& total = *reinterpret_cast<float2*>(
              accum + (m * 16 + h * 8 + lane / 4) * HEAD_DIM + n * 8 + (lane % 4) * 2);
          if (!p.dq_first) {
            dq.x[m][n][2 * h] += total.x;
            dq.x[m][n][2 * h + 1] += total.y;
          }
          if (!p.dq_last) total = float2{dq.x[m][n][2 * h], dq.x[m][n][2 * h + 1]};
        }
    if (!p.dq_last) return;
  }
  dq.scale(p.softmax_scale);
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  __syncthreads();  // everybody is done with the stages
  store_rows<Target, T, HEAD_DIM, MT>(dq, sStage + warp_row0 * HEAD_DIM * 2,
                                      head_begin(p.dq, block.batch, block.head_kv, block.member) +
                                          (block.row0 + warp_row0) * p.dq.row,
                                      p.dq.row, p.seqlen_q - block.row0 - warp_row0);
}

template <class Config>
cudaError_t launch_dq_gemm(const void* kernel, const void* params, cudaStream_t stream) {
  const auto& p = *static_cast<const BwdParams*>(params);
  const int64_t tiles = (p.seqlen_q + Config::BLOCK_M - 1) / Config::BLOCK_M;
  return launch_1d<Config>(kernel, params, tiles * p.units * p.group, stream);
}

}  // namespace flash_dist

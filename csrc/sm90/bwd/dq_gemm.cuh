// dQ = dS @ K from the spilled dS, on Hopper: a product over the key tiles of the chunk that are
// visible to the block's queries.
//
// Grid      x = one block for each query tile of each query head of the chunk; above head_dim 256 a
//           cluster of two blocks, each with half of the columns.
// Block     A warpgroup of which one thread loads, and 2 warpgroups of 64 queries each.
// Shared    STAGES stages of one 64-key tile of K and the dS tiles of the block's queries.
// Pipeline  TMA fills the stages. While the products of a stage run, a warp reads its fragments of
//           dS of the next stage.
//
// The stored fragments are those of dS^T; transposing their four 8x8 tiles in registers gives the A
// operand of dS. Key chunks are summed in one accumulator, which is kept in dq_accum between them,
// so the order of summation is the same as without chunks.
#pragma once

#include "core/ds_scale.h"
#include "core/sequence.cuh"
#include "ptx/registers.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/bwd/config.h"
#include "sm90/bwd/launch.h"
#include "sm90/rows.cuh"

namespace flash_dist {

template <class Config>
struct DqGemmSm90 {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  using Tile = typename Config::Tile;
  using Stages = Ring<Config::STAGES>;
  static constexpr int COLUMNS = Config::COLUMNS;
  static constexpr int BLOCKS = DS_TILE / 16;  // blocks of 16 keys per tile
  using Sum = Accumulator<1, COLUMNS / 8>;
  using Fragments = uint32_t[BLOCKS][1][4];  // dS of a warp's 16 queries and a tile's keys

  const DqSm90Params& params;
  Smem& smem;
  const BwdParams& p = params.p;
  const DqSm90Work<Config::BLOCK_M>& work = smem.work;

  // Loads K and dS of all stages, in one thread.
  __device__ __forceinline__ void load() const {
    const DqBlock& block = work.block;
    const uint8_t* slots = static_cast<const uint8_t*>(p.ds) +
                           static_cast<int64_t>(block.head) * p.ds_tiles_per_head * DS_TILE_BYTES;
    Stages stages;
#pragma unroll 1
    for (int i = work.key_blocks.begin; i < work.key_blocks.end; ++i, stages.advance()) {
      const DqSm90Item item = work.item(p, i);
      const int bytes = min(blocks_of(item.key0), BLOCKS) * BLOCKS * DS_BLOCK_BYTES;
      const int tiles = (item.slot[0] >= 0) + (item.slot[1] >= 0);
      const int s = stages.stage();
      const uint32_t full = shared_address(&smem.barriers.full[s]);
      smem.barriers.wait_for_place(stages);
      smem.item[s] = item;
      mbarrier_expect(full, Config::TILE_BYTES + tiles * bytes);
      BoxPlace at{0, work.sequence.k0 + item.key0, 0, block.head_kv * params.k_axes.head_kv,
                  block.batch * params.k_axes.batch};
#pragma unroll
      for (int panel = 0; panel < Config::PANELS; ++panel) {
        at.column = column0() + panel * Tile::COLUMNS;
        load_box(shared_address(smem.k[s]) + panel * Tile::BYTES, params.k, at, full);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (item.slot[half] < 0) continue;
        load_bytes(shared_address(smem.ds[s][half]),
                   slots + static_cast<int64_t>(item.slot[half]) * DS_TILE_BYTES, bytes, full);
      }
    }
  }

  // Computes dQ, in a warpgroup of 64 queries.
  __device__ __forceinline__ void compute() const {
    Sum dq;
    dq.clear();
    if (p.dq_accum != nullptr && !p.dq_first) {
      each_accumulated(dq, [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
    }
    mainloop(dq);
    if (p.dq_accum != nullptr && !p.dq_last) {
      each_accumulated(dq, [](float& x, float& y, float2& at) { at = {x, y}; });
      return;
    }
    dq.scale(gradient_scale<typename Config::T>(p.softmax_scale));
    barrier_sync(ALL_CONSUMERS, Config::CONSUMERS * WARPGROUP);  // every warp has read all of K
    const DqBlock& block = work.block;
    const int row0 = block.row0 + consumer() * DS_TILE;
    store_rows<Tile, Target, T>(dq, shared_address(smem.k[consumer()]),
                                head_begin(p.dq, block.batch, block.head_kv, block.head_in_group) +
                                    static_cast<int64_t>(work.sequence.q0 + row0) * p.dq.row +
                                    column0(),
                                p.dq.row, work.sequence.seqlen_q - row0, p.head_dim - column0());
  }

 private:
  // Returns the first column of dQ that this block computes.
  __device__ __forceinline__ static int column0() {
    if constexpr (Config::CLUSTER == 1) return 0;
    return fresh_block() % Config::CLUSTER * COLUMNS;
  }
  // Returns the number of blocks of 16 keys from key0 to the last key. dS of blocks past the last
  // key may not have been stored.
  __device__ __forceinline__ int blocks_of(int key0) const {
    return (work.sequence.seqlen_k - key0 + 15) / 16;
  }

  // Calls f(x, y, accumulated) for each pair of adjacent columns of dQ that this lane holds.
  // accumulated: the same two columns in dq_accum, which keeps dQ between key chunks.
  template <class F>
  __device__ __forceinline__ void each_accumulated(Sum& dq, F f) const {
    const int64_t rows = (p.seqlen_q + STATISTICS_ALIGNMENT - 1) / STATISTICS_ALIGNMENT *
                         int64_t{STATISTICS_ALIGNMENT};
    const int lane = fresh_thread() % 32;
    const int row = consumer() * DS_TILE + warp_of_consumer() * 16 + lane / 4;
    // NOTE: dq_accum has p.head_dim columns, not HEAD_DIM: the dQ kernel and the dK/dV kernel are
    // chosen independently, and the size of the workspace follows from the dK/dV kernel.
    float* at = p.dq_accum + (work.block.head * rows + work.block.row0 + row) * p.head_dim +
                column0() + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        if (column0() + n * 8 < p.head_dim) {
          f(dq.x[0][n][2 * h], dq.x[0][n][2 * h + 1],
            *reinterpret_cast<float2*>(at + h * 8 * p.head_dim + n * 8));
        }
      }
  }

  __device__ __forceinline__ void mainloop(Sum& dq) const {
    const int count = work.key_blocks.end - work.key_blocks.begin;
    if (count <= 0) return;
    Fragments ds, next;
    Stages stages;
    bool clean = load_fragments(ds, stages), next_clean = true;
#pragma unroll 1
    for (int left = count - 1; left >= 0; --left) {
      const int s = stages.stage();
      if (!clean) clear_keys(s);
      // dQ += dS @ K                                        [64, COLUMNS]
      const uint64_t b_k = Tile::by_columns(shared_address(smem.k[s]));
      hold(ds);
      hold(dq.x[0]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCKS; ++k)
        wgmma<T, true>(dq.x[0], ds[k][0], b_k + Tile::columns_step(k));
      wgmma_commit();
      stages.advance();
      // NOTE: the load is in a branch, because ptxas does not move waits across a branch.
      if (left > 0) next_clean = load_fragments(next, stages);
      wgmma_wait<0>();
      hold(dq.x[0]);
      hold(ds);
      smem.barriers.release(s);
#pragma unroll
      for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[k][0][i] = next[k][0][i];
      clean = next_clean;
    }
  }

  // Waits for a stage and reads this warp's fragments of dS, or zeros for keys without stored dS.
  // Returns whether all keys of the stage exist.
  __device__ __forceinline__ bool load_fragments(Fragments& ds, const Stages& stages) const {
    smem.barriers.wait_for_data(stages);
    const int half = consumer();
    const DqSm90Item& item = smem.item[stages.stage()];
    const int key0 = item.key0;
    const int blocks = item.slot[half] < 0 ? 0 : blocks_of(key0);
    const uint32_t at = shared_address(smem.ds[stages.stage()][half]) +
                        warp_of_consumer() * DS_BLOCK_BYTES + fresh_thread() % 32 * 16;
#pragma unroll
    for (int k = 0; k < BLOCKS; ++k) {
      const uint4 x = load_shared_16(at + k * 4 * DS_BLOCK_BYTES);
      ds[k][0][0] = movmatrix_trans(x.x);
      ds[k][0][1] = movmatrix_trans(x.z);
      ds[k][0][2] = movmatrix_trans(x.y);
      ds[k][0][3] = movmatrix_trans(x.w);
    }
    if (blocks < BLOCKS) {
#pragma unroll
      for (int k = 0; k < BLOCKS; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) ds[k][0][i] = k < blocks ? ds[k][0][i] : 0;
    }
    return work.keys.first <= key0 && key0 + DS_TILE <= work.keys.end;
  }

  // Zeroes the rows of K whose keys do not exist. Both warpgroups must call this, with the same
  // stage.
  __device__ __forceinline__ void clear_keys(int s) const {
    constexpr int THREADS = Config::CONSUMERS * WARPGROUP;
    const int key0 = smem.item[s].key0;
    clear_rows<Tile, DS_TILE, Config::PANELS, THREADS>(
        shared_address(smem.k[s]), {work.keys.first - key0, work.keys.end - key0},
        fresh_thread() - WARPGROUP);
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, THREADS);
  }
};

template <class Config>
__device__ __forceinline__ void dq_gemm_sm90_block(const DqSm90Params& params) {
  const BwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DqBlock block(p, Config::BLOCK_M, fresh_block() / Config::CLUSTER);
  const Sequence sequence(p, block.batch);
  if (block.row0 >= sequence.seqlen_q) return;

  if (threadIdx.x == 0) {
    prefetch_map(params.k);
    smem.barriers.make(Config::CONSUMERS * 4);
    mbarriers_made();
    smem.work = DqSm90Work<Config::BLOCK_M>(p, block, sequence);
  }
  __syncthreads();

  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x == 0) DqGemmSm90<Config>{params, smem}.load();
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    DqGemmSm90<Config>{params, smem}.compute();
  }
}

}  // namespace flash_dist

// Attention of few queries to short caches, on mma.sync: two blocks share a work tile (sm_90 and
// newer).
//
// Grid      A cluster of two blocks per work tile. All key blocks of a work tile are one group.
// Block     As in mma/decode/kernel.cuh. The first block has the first half of the key blocks, and
//           the second block has the other half.
// Shared    As in mma/decode/kernel.cuh, and the partials of the second block's key blocks, which
//           that block stores to the first block's memory. The first block combines its own key
//           blocks, then those of the second block: this is the order of the keys. The results are
//           bit-identical to mma/decode/kernel.cuh and core/decode_combine.h.
#pragma once

#include "mma/decode/kernel.cuh"
#include "ptx/cluster.cuh"

namespace flash_dist {

template <class Config>
struct BlockPair;

template <class Target, class T, int HEAD_DIM_, int HEAD_DIM_V_, int PLAN>
struct DecodePairSm90Config : DecodeConfigOf<DecodePairSm90Plan<HEAD_DIM_, HEAD_DIM_V_, PLAN>,
                                             Target, T, HEAD_DIM_, HEAD_DIM_V_, PLAN> {
  using Base = DecodeConfigOf<DecodePairSm90Plan<HEAD_DIM_, HEAD_DIM_V_, PLAN>, Target, T,
                              HEAD_DIM_, HEAD_DIM_V_, PLAN>;
  static constexpr bool IN_PAIRS = true;
  static constexpr int CLUSTER = 2;
  static constexpr int RECORDS = GROUP_BLOCKS / CLUSTER;
  static constexpr int OT = HEAD_DIM_V_ / 8 / Base::WARPS_N;  // must equal SharedRows::OT
  using Splits = BlockPair<DecodePairSm90Config>;
  struct Smem : Base::Smem {
    // O, then top and sum, per key block of the second block. A thread of the second block stores
    // them for the thread of the first block that has the same rows and columns.
    float4 records[RECORDS][OT + 1][Base::THREADS];
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert((SMEM_BYTES + 1024) * Base::Plan::MIN_BLOCKS <= smem_plan_bytes(PLAN) + 1024);
};

// The work tile of a cluster, and this block's key blocks.
template <class Config>
struct BlockPair {
  using Smem = typename Config::Smem;
  static constexpr int OT = Config::OT;

  Smem& smem;
  const int rank;

  __device__ __forceinline__ explicit BlockPair(Smem& smem_) : smem(smem_), rank(cluster_rank()) {}

  // Returns the cursor at the first key block of this block. If the cursor has place >=
  // extent.tiles, the cluster has no work tile.
  __device__ __forceinline__ DecodeCursor first(const DecodeParams& p) const {
    const int tile = static_cast<unsigned>(blockIdx.x) / Config::CLUSTER;
    const int row_tile = tile / p.num_heads_kv;
    DecodeCursor at(p, RowTile::at(p, row_tile), 0, 0);
    at.head = tile - row_tile * p.num_heads_kv;
    if (rank > 0) at.key_block += of_first(at.extent);
    return at;
  }
  __device__ __forceinline__ int key_blocks(const DecodeExtent& extent) const {
    return rank == 0 ? of_first(extent) : extent.key_blocks() - of_first(extent);
  }

  // In the second block: stores the partial of a key block to the first block's shared memory.
  __device__ __forceinline__ void send(const DecodeCursor& at, const Partial<OT>& key_block) const {
    const int number = at.key_block - at.extent.first - of_first(at.extent);
    if (number == 0) cluster_wait();  // the first block has started
    const auto place = [&](int i) {
      return address_in(0, shared_address(&smem.records[number][i][threadIdx.x]));
    };
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float (&x)[4] = key_block.out.x[0][n];
      store_cluster_16(place(n), {x[0], x[1], x[2], x[3]});
    }
    store_cluster_16(place(OT),
                     {key_block.top[0], key_block.top[1], key_block.sum[0], key_block.sum[1]});
  }
  // In the first block: combines the key blocks of both blocks in key order, and writes the result.
  // The second block only takes part in the barrier that makes its partials visible.
  __device__ __forceinline__ void finish(const DecodeParams& p, const WarpPlace<Config>& own,
                                         Partial<OT>& group) const {
    if (rank == 0) cluster_wait();
    cluster_sync();
    if (rank > 0) return;
    const DecodeCursor at = first(p);
    const int others = at.extent.key_blocks() - of_first(at.extent);
#pragma unroll 1
    for (int i = 0; i < others; ++i) group.combine(record(i));
    Partial<OT> tile;
    tile.clear();
    tile.combine(group);
    store_result(p, tile, at, own);
  }
  // Waits at the barriers of send() and finish(), in a second block without key blocks.
  __device__ __forceinline__ static void finish() {
    cluster_wait();
    cluster_sync();
  }

 private:
  __device__ __forceinline__ static int of_first(const DecodeExtent& extent) {
    return (extent.key_blocks() + 1) / 2;
  }
  __device__ __forceinline__ Partial<OT> record(int number) const {
    const auto& own = smem.records[number];
    Partial<OT> partial;
#pragma unroll
    for (int n = 0; n < OT; ++n) {
      const float4 x = own[n][threadIdx.x];
      float (&to)[4] = partial.out.x[0][n];
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    }
    const float4 stats = own[OT][threadIdx.x];
    partial.top[0] = stats.x, partial.top[1] = stats.y;
    partial.sum[0] = stats.z, partial.sum[1] = stats.w;
    return partial;
  }
};

// First block: combines a key block with the group. Second block: sends the key block to the first
// block.
template <class Config, int OT>
__device__ __forceinline__ bool take_key_block(const DecodeParams&, const BlockPair<Config>& pair,
                                               const DecodeCursor& at, SplitBounds,
                                               const WarpPlace<Config>&,
                                               const Partial<OT>& key_block, Partial<OT>& group) {
  if (pair.rank == 0) {
    group.combine(key_block);
  } else {
    pair.send(at, key_block);
  }
  return false;
}

template <class Config>
__device__ __forceinline__ void decode_pair_sm90_block(const DecodeParams& p) {
  using Target = typename Config::Target;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);

  let_next_start<Target>();
  if (p.packing.cu_seqlens_q != nullptr && !p.few_alone) fill_uncovered<Config>(p);
  const BlockPair<Config> pair(smem);
  const DecodeCursor first = pair.first(p);
  if (first.place >= first.extent.tiles) return;
  cluster_arrive();
  const int key_blocks = pair.key_blocks(first.extent);
  if (key_blocks == 0) return pair.finish();
  DecodeBlock<Config>(p, smem, WarpPlace<Config>(), pair, first, first, key_blocks).run(key_blocks);
}

}  // namespace flash_dist

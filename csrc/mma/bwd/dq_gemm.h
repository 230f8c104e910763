// dQ = dS @ K from the stored dS. A block sums over the chunk's key tiles visible to its queries.
//
// Grid      x = query tile, query head of the chunk's (batch, kv head) pairs.
// Block     SPLIT = 1: a warp owns ROWS queries over the whole head_dim. SPLIT = 2: two warps share
//           ROWS queries, and each owns every other block of 16 columns.
// Shared    STAGES stages of one 64-key tile of K and the dS tiles of the block's queries.
//
// The stored fragments are those of dS^T. Transposing their four 8x8 tiles in registers gives the A
// operand of dS. Key chunks are summed in one accumulator, kept in dq_accum between launches, so
// the order of summation is the same as without chunks.
#pragma once

#include "core/block_iterators.cuh"
#include "core/blocks.cuh"
#include "core/ds_scale.h"
#include "core/pipeline.cuh"
#include "core/sequence.cuh"
#include "mma/bwd/config.h"
#include "mma/fragments.cuh"

namespace flash_dist {

// Copies the dS tiles of DS_TILES adjacent query tiles. Tiles without a slot become zeros.
template <class Config>
struct DsCopy {
  using Target = typename Config::Target;
  static constexpr int PASSES = DS_TILE_BYTES / 16 / Config::THREADS;
  static constexpr bool LATE = LOADS_LATE<Target, Config::HEAD_DIM>;
  static constexpr bool STAGED = !Target::HAS_CP_ASYNC && !LATE;
  uint4 staged[STAGED ? Config::DS_TILES * PASSES : 1];
  const uint8_t* late_slots;
  int2 late_slot;
  int late_bytes;

  // keys: number of the tile's keys that exist. Later blocks of 16 keys, which may not be stored,
  // become zeros.
  __device__ __forceinline__ void fetch(uint32_t smem, const uint8_t* slots, int2 slot, int keys) {
    const int bytes = !PARTLY_STORED<Config::HEAD_DIM>
                          ? DS_TILE_BYTES
                          : (min(keys, DS_TILE) + 15) / 16 * (DS_TILE / 16) * DS_BLOCK_BYTES;
    if constexpr (LATE) {
      late_slots = slots;
      late_slot = slot;
      late_bytes = bytes;
    } else {
      each(slots, slot, bytes, [&](int offset, const uint8_t* src, bool valid, int i) {
        if constexpr (STAGED) {
          staged[i] = valid ? load_global_16(src) : uint4{0, 0, 0, 0};
        } else {
          cp_async_16(smem + offset, src, valid);
        }
      });
    }
  }

  __device__ __forceinline__ void land(uint32_t smem) {
    if constexpr (LATE) {
      each(late_slots, late_slot, late_bytes, [&](int offset, const uint8_t* src, bool valid, int) {
        store_shared_16(smem + offset, valid ? load_global_16(src) : uint4{0, 0, 0, 0});
      });
    } else if constexpr (STAGED) {
      each(nullptr, {}, 0, [&](int offset, const uint8_t*, bool, int i) {
        store_shared_16(smem + offset, staged[i]);
      });
    }
  }

 private:
  // Calls f(offset in the stage, source address, whether the source exists, index) for each 16-byte
  // chunk of this thread.
  template <class F>
  __device__ __forceinline__ static void each(const uint8_t* slots, int2 slot, int bytes, F f) {
    const int thread = fresh_thread();
#pragma unroll
    for (int t = 0; t < Config::DS_TILES; ++t) {
      const int here = t == 0 ? slot.x : slot.y;
      const uint8_t* src = slots + static_cast<int64_t>(here) * DS_TILE_BYTES;
#pragma unroll
      for (int i = 0; i < PASSES; ++i) {
        const int offset = (i * Config::THREADS + thread) * 16;
        f(t * DS_TILE_BYTES + offset, src + offset, here >= 0 && offset < bytes, t * PASSES + i);
      }
    }
  }
};

// Addresses of the stages of K and dS in shared memory; s is a stage.
template <class Config>
struct DqGemmTiles {
  using Stage = typename Config::Stage;
  uint32_t stages;

  __device__ __forceinline__ explicit DqGemmTiles(typename Config::Smem& smem)
      : stages(shared_address(&smem.stage[0])) {}

  __device__ __forceinline__ uint32_t k(int s) const {
    return stages + s * static_cast<int>(sizeof(Stage));
  }
  __device__ __forceinline__ uint32_t ds(int s) const {
    return k(s) + static_cast<int>(offsetof(Stage, ds));
  }
};

// find(i, n): sets n to the key tile of item i, and returns the dS slots of this key tile for the
// block's query tiles m and m + 1; -1: no slot. Must be called for the items in ascending order.
template <class Config>
struct DsSlots {
  const BwdParams& p;
  const Mask& mask;
  const DsLayout& layout;
  const DsBlockIterator<Config::BLOCK_M>& key_blocks;
  const int& m;    // the block's first query tile
  int& band_slot;  // bands: first slot of the next key tile

  __device__ __forceinline__ int2 find(int i, int& n) const {
    n = key_blocks.begin + i;
    if (key_blocks.entries != nullptr) {
      const int first = p.mask.key_slots[p.key_begin / DS_TILE];
      const int2 slots = key_blocks.slots[n];
      n = key_blocks.entries[n].x;
      return {slots.x < 0 ? -1 : slots.x - first, slots.y < 0 ? -1 : slots.y - first};
    }
    if (p.mask.kind == MaskKind::BAND) {
      const int begin = layout.query_begin(n);
      const int end = layout.query_end(n);
      const int slot = band_slot + m - layout.first_with_slot(n);
      band_slot += layout.width(n);
      return {m >= begin && m < end ? slot : -1, m + 1 >= begin && m + 1 < end ? slot + 1 : -1};
    }
    const int slot = slot_base(mask, layout, p.key_begin / DS_TILE, n) + m;
    return {mask.range(m * DS_TILE, DS_TILE).touches(n * DS_TILE, DS_TILE) ? slot : -1,
            (m + 1) * DS_TILE < mask.seqlen_q &&
                    mask.range((m + 1) * DS_TILE, DS_TILE).touches(n * DS_TILE, DS_TILE)
                ? slot + 1
                : -1};
  }
};

template <class Config>
struct DqGemm {
  using Target = typename Config::Target;
  using T = typename Config::T;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int SPLIT = Config::SPLIT;
  static constexpr int MT = Config::ROW_TILES;
  static constexpr int NT = HEAD_DIM / 8 / SPLIT;
  using Sum = Accumulator<MT, NT>;

  const BwdParams& p;
  const DqGemmTiles<Config>& tiles;
  const DqBlock& block;
  const Sequence& sequence;
  const int &lane, &part;  // part: index among the SPLIT warps that share the warp's queries
  const int& warp_row0;    // the warp's first query in the block

  // Calls f(x, y, pair) for each pair of columns x, y of this lane's part of dQ. pair: a reference
  // to the same columns in dq_accum.
  template <class F>
  __device__ __forceinline__ void each_accumulated(Sum& dq, F f) const {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          f(dq.x[m][n][2 * h], dq.x[m][n][2 * h + 1], *accumulated(m, h, n));
        }
  }

  // dQ += dS @ K, 16 keys of stage s at a time           [ROWS, HEAD_DIM / SPLIT] per warp
  __device__ __forceinline__ void add(Sum& dq, int s) const {
    const auto b_k = share(Operand<HEAD_DIM>::b_trans(tiles.k(s)), part);
    const uint32_t ds = tiles.ds(s) + warp_row0 / DS_TILE * DS_TILE_BYTES +
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
      gemm_ab_step<Target, T, HEAD_DIM, SPLIT>(dq, rDs, b_k, k * 16);
    }
  }

  // Scales and rounds dQ, and writes it through the shared memory of the stages.
  __device__ __forceinline__ void store(Sum& dq) const {
    dq.scale(gradient_scale<T>(p.softmax_scale));
    if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
    __syncthreads();  // every warp has read the stages
    const int row0 = block.row0 + warp_row0;
    store_sum<Config, HEAD_DIM>(dq, tiles.stages + warp_row0 * HEAD_DIM * 2, part,
                                head_begin(p.dq, block.batch, block.head_kv, block.head_in_group) +
                                    static_cast<int64_t>(sequence.q0 + row0) * p.dq.row,
                                p.dq.row, sequence.seqlen_q - row0, p.head_dim);
  }

 private:
  __device__ __forceinline__ float2* accumulated(int m, int h, int n) const {
    const int64_t rows = (p.seqlen_q + STATISTICS_ALIGNMENT - 1) / STATISTICS_ALIGNMENT *
                         int64_t{STATISTICS_ALIGNMENT};
    const int64_t row = block.head * rows + block.row0 + warp_row0 + m * 16 + h * 8 + lane / 4;
    const int column = (n / 2 * SPLIT + part) * 16 + n % 2 * 8 + (lane % 4) * 2;
    return reinterpret_cast<float2*>(p.dq_accum + row * HEAD_DIM + column);
  }
};

template <class Config>
__device__ __forceinline__ void dq_gemm_block(const BwdParams& p) {
  using Target = typename Config::Target;
  using Kernel = DqGemm<Config>;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DqGemmTiles<Config> tiles(smem);
  const DqBlock block(p, Config::BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (block.row0 >= sequence.seqlen_q) return;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int part = warp % Config::SPLIT;
  const int warp_row0 = warp / Config::SPLIT * Config::ROWS;
  const Kernel kernel{p, tiles, block, sequence, lane, part, warp_row0};

  const Mask mask(p.mask, MaskPlace(p.mask, sequence, block.batch,
                                    block.head_kv * p.group + block.head_in_group));
  const DsLayout layout = ds_layout(p, sequence);
  const DsBlockIterator<Config::BLOCK_M> key_blocks(p, mask, block.row0);
  const RowSpan keys = mask.keys_that_exist(block.batch);
  const uint8_t* gDs = static_cast<const uint8_t*>(p.ds) +
                       static_cast<int64_t>(block.head) * p.ds_tiles_per_head * DS_TILE_BYTES;
  const uint16_t* gK =
      head_begin(p.k, block.batch, block.head_kv, 0) + static_cast<int64_t>(sequence.k0) * p.k.row;
  TileCopy<Target, DS_TILE, Config::HEAD_DIM, Config::THREADS> copy_k;
  DsCopy<Config> copy_ds;
  const int m = block.row0 / DS_TILE;
  int band_slot = static_cast<int>(layout.slots(p.key_begin / DS_TILE, key_blocks.begin));
  const DsSlots<Config> slots{p, mask, layout, key_blocks, m, band_slot};

  typename Kernel::Sum dq;
  dq.clear();
  if (p.dq_accum != nullptr && !p.dq_first) {
    kernel.each_accumulated(dq, [](float& x, float& y, float2 from) { x = from.x, y = from.y; });
  }
  run_pipeline<Target, Config::STAGES>(
      max(key_blocks.end - key_blocks.begin, 0),
      [&](int i, int s) {
        int n;
        const int2 slot = slots.find(i, n);
        const int key0 = n * DS_TILE;
        copy_k.fetch(tiles.k(s), gK + key0 * p.k.row, p.k.row, {keys.first - key0, keys.end - key0},
                     p.head_dim);
        copy_ds.fetch(tiles.ds(s), gDs, slot, sequence.seqlen_k - key0);
      },
      [&](int s) {
        copy_k.land(tiles.k(s));
        copy_ds.land(tiles.ds(s));
      },
      [&](int, int s) { kernel.add(dq, s); });
  if (p.dq_accum != nullptr && !p.dq_last) {
    kernel.each_accumulated(dq, [](float x, float y, float2& to) { to = {x, y}; });
    return;
  }
  kernel.store(dq);
}

}  // namespace flash_dist

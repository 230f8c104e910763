// The loading warpgroup: one warp issues the TMA copies of keys, the other warps copy queries.
#pragma once

#include "core/decode_work.cuh"
#include "core/sequence.cuh"
#include "ptx/copy.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/mla/config.h"

namespace flash_dist {

// Returns whether the key block at the cursor is the first one of the split or of its work tile.
__device__ __forceinline__ bool begins_tile(const DecodeCursor& at, bool is_first) {
  return is_first || at.key_block == at.extent.first;
}

// The destination of a panel of a tile, and the barrier of its copy.
struct PanelPlace {
  int panel;
  uint32_t smem, full;
};

// Loads, in one warp, the keys of a split. While a key block is loaded, the cache locations of the
// next one are read from the block table: lane c has the location of the c-th run of 16 contiguous
// keys.
template <class Config>
class LatentKeyLoader {
 protected:
  using Smem = typename Config::Smem;
  using Tile = typename Config::Tile;
  static constexpr int PIECES = KEY_BLOCK / PAGE_STEP;

  __device__ __forceinline__ LatentKeyLoader(const MlaSm90Params& params, Smem& smem)
      : params_(params), smem_(smem) {}

  __device__ __forceinline__ void find(const DecodeCursor& at) {
    const int key = at.key_block * KEY_BLOCK + static_cast<int>(threadIdx.x) % PIECES * PAGE_STEP;
    next_entry_ = next_row_ = 0;
    if (key < at.extent.visible_end) {
      const CachePlace place(params_.p.cache, at.batch, at.extent.leftpad + key);
      next_entry_ = place.entry;
      next_row_ = place.row;
    }
  }
  // Starts the key block that find() has found. The consumers must have finished the key block that
  // is CURSORS key blocks before it.
  __device__ __forceinline__ void begin(const DecodeCursor& at) {
    if (threadIdx.x % 32 == 0) smem_.key_blocks[number_ % Config::CURSORS] = at;
    entry_ = next_entry_;
    row_ = next_row_;
    head_ = at.head;
    exist_ = at.extent.visible_end - at.key_block * KEY_BLOCK;
  }

  // Loads COUNT panels of a tile: the boxes in which a key exists. place(i) returns the PanelPlace
  // of the i-th panel.
  template <int COUNT, class Place>
  __device__ __forceinline__ void load_panels(int tile, Place place) const {
    const bool issues = threadIdx.x % 32 == 0;
    const int keys = min(max(exist_ - tile * Config::BLOCK_N, 0), Config::BLOCK_N);
    const int box = params_.box_keys;  // keys per box, a power of two
    if (issues) {
      const int bytes = (keys + box - 1 & -box) * Tile::ROW_BYTES;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) mbarrier_expect(place(i).full, bytes);
    }
    __syncwarp();
#pragma unroll 1
    for (int key = 0; key < keys; key += box) {
      const int piece = (tile * Config::BLOCK_N + key) / PAGE_STEP;
      BoxPlace at{0, __shfl_sync(0xffffffffu, row_, piece), 0, head_ * params_.k_axes.head_kv,
                  __shfl_sync(0xffffffffu, entry_, piece) * params_.k_axes.batch};
      if (!issues) continue;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const PanelPlace to = place(i);
        at.column = to.panel * Tile::COLUMNS;
        load_box(to.smem + key * Tile::ROW_BYTES, params_.k, at, to.full);
      }
    }
  }

  const MlaSm90Params& params_;
  Smem& smem_;
  int number_ = 0;  // index in the split of the key block being loaded

 private:
  int next_entry_, next_row_;  // place of this lane's 16 keys in the next key block
  int entry_, row_;            // place of this lane's 16 keys in the key block being loaded
  int head_, exist_;           // kv head and number of existing keys of that key block
};

// Loads both tiles of each key block together, panel by panel as their places become free. Each
// panel has a barrier.
template <class Config>
class LatentKeys : LatentKeyLoader<Config> {
  using Base = LatentKeyLoader<Config>;
  using Base::number_;
  using Base::smem_;
  using typename Base::Smem;
  using typename Base::Tile;

 public:
  __device__ __forceinline__ LatentKeys(const MlaSm90Params& params, Smem& smem)
      : Base(params, smem) {}

  // NOTE: loads in the order in which both consumers release panels; otherwise the loader and the
  // consumers would wait for each other.
  __device__ __forceinline__ void load(DecodeCursor at, int key_blocks) {
    this->find(at);
#pragma unroll 1
    for (; number_ < key_blocks; ++number_) {
      wait_for_place<0, 0>();
      this->begin(at);
      load_part<0, 0>();
      load_part<1, 1>();
      load_part<0, 1>();
      load_part<1, 0>();
      if (number_ + 1 == key_blocks) return;
      at.advance(this->params_.p);
      this->find(at);
    }
  }

 private:
  template <int TILE, int PART>
  __device__ __forceinline__ void wait_for_place() const {
    mbarrier_wait(shared_address(&smem_.k_empty[TILE][PART]), number_ % 2 ^ 1);
  }

  // Loads the panels of a tile whose last reader is consumer PART.
  template <int TILE, int PART>
  __device__ __forceinline__ void load_part() const {
    wait_for_place<TILE, PART>();
    this->template load_panels<Config::panel_count(TILE, PART)>(TILE, [&](int i) {
      const int panel = Config::panel_of(PART, i);
      return PanelPlace{panel, shared_address(smem_.k[TILE]) + panel * Tile::BYTES,
                        shared_address(&smem_.k_full[TILE][panel])};
    });
  }
};

// Loads the queries of a split, one work tile after the other, in the other three warps of the
// loading warpgroup. Each warp loads one row at a time. Rows that do not exist become zeros.
template <class Config>
__device__ __forceinline__ void load_queries(const DecodeParams& p, typename Config::Smem& smem,
                                             DecodeCursor at, int key_blocks) {
  constexpr int WARPS = Config::QUERY_LOADERS / 32;
  constexpr int ROWS = (Config::BLOCK_ROWS + WARPS - 1) / WARPS;  // rows per warp
  static_assert(ROWS <= 32);
  const int warp = static_cast<int>(threadIdx.x) / 32 - 1,
            lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t sQ = shared_address(smem.q);
  int tiles = 0;
#pragma unroll 1
  for (bool is_first = true; key_blocks > 0; --key_blocks, at.advance(p), is_first = false) {
    if (!begins_tile(at, is_first)) continue;
    mbarrier_wait(shared_address(&smem.q_empty), tiles % 2 ^ 1);
    ++tiles;
    const uint16_t* own =
        nullptr;  // the row of this lane: each lane computes the address of one row
    const int own_row = warp + lane * WARPS;
    const int tile_row = at.row0(p) + block_row0<Config>(p) + own_row;
    if (own_row < Config::BLOCK_ROWS && tile_row < at.extent.rows(p)) {
      const int query = divide(tile_row, p.by_group);
      own = head_begin(p.q, at.batch, at.head, tile_row - query * p.group) +
            (at.extent.q0 + query) * p.q.row;
    }
#pragma unroll 2
    for (int i = 0; i < ROWS; ++i) {
      const int row = warp + i * WARPS;
      const auto* src = reinterpret_cast<const uint16_t*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own), i));
      if (row >= Config::BLOCK_ROWS) continue;
#pragma unroll
      for (int first = 0; first < Config::CHUNKS; first += 32) {
        const int chunk = first + lane;
        if (chunk >= Config::CHUNKS) continue;
        const bool valid = src != nullptr && chunk * 8 < p.head_dim;
        cp_async_16(sQ + Config::Tile::offset(row, chunk),
                    valid ? src + chunk * 8 : static_cast<const uint16_t*>(p.q.data), valid);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();  // wgmma reads the copied queries
    mbarrier_arrive(shared_address(&smem.q_full));
  }
}

}  // namespace flash_dist

// The warpgroup that loads: one warp lets the copy engine load keys, the others copy queries.
#pragma once

#include "core/decode_work.cuh"
#include "core/sequence.cuh"
#include "ptx/copy.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/mla/config.h"

namespace flash_dist {

// Whether the next key block of a split is its first of a work tile.
__device__ __forceinline__ bool begins_tile(const DecodeCursor& at, bool is_first) {
  return is_first || at.key_block == at.extent.first;
}

// Loads the keys of a split, tile after tile, by one warp. Panels of a tile are loaded as their
// places become free, each with its barrier. Addresses of the next key block are read from the
// tables while this one is loaded: lane c has that of the 16 keys with number c, which lie
// together.
template <class Config>
class LatentKeys {
  using Smem = typename Config::Smem;
  using Tile = typename Config::Tile;
  static constexpr int PIECES = KEY_BLOCK / PAGE_STEP;

 public:
  __device__ __forceinline__ LatentKeys(const MlaSm90Params& params, Smem& smem)
      : params_(params), smem_(smem) {}

  __device__ __forceinline__ void load(DecodeCursor at, int key_blocks) {
    find(at);
#pragma unroll 1
    for (int i = 0; key_blocks > 0; ++i, --key_blocks) {
      store_cursor(at, i);
      entry_ = next_entry_;
      row_ = next_row_;
      head_ = at.head;
      const int exist = at.extent.visible_end - at.key_block * KEY_BLOCK;
#pragma unroll 1
      for (int j = 0; j < Config::TILES; ++j, ring_.advance()) {
        load_tile(j, exist);
        if (j > 0 || key_blocks == 1) continue;
        at.advance(params_.p);
        find(at);
      }
    }
  }

 private:
  // Stores the cursor of key block `number` of the split, before its panels are loaded.
  __device__ __forceinline__ void store_cursor(const DecodeCursor& at, int number) const {
    if (threadIdx.x % 32 != 0) return;
    wait_for_place(Config::keys_alone());
    smem_.key_blocks[number % Config::CURSORS] = at;
  }

  __device__ __forceinline__ void wait_for_place(const PanelGroup& group) const {
    mbarrier_wait(shared_address(&smem_.k_empty[ring_.stage()][group.number]), ring_.parity() ^ 1);
  }

  __device__ __forceinline__ void find(const DecodeCursor& at) {
    const int key = at.key_block * KEY_BLOCK + static_cast<int>(threadIdx.x) % PIECES * PAGE_STEP;
    next_entry_ = next_row_ = 0;
    if (key < at.extent.visible_end) {
      const CachePlace place(params_.p.cache, at.batch, at.extent.leftpad + key);
      next_entry_ = place.entry;
      next_row_ = place.row;
    }
  }

  // Loads tile i of the key block. `exist`: keys of the key block.
  __device__ __forceinline__ void load_tile(int i, int exist) const {
    const int keys = min(max(exist - i * Config::BLOCK_N, 0), Config::BLOCK_N);
    load_panels<Config::keys_alone().count>(Config::keys_alone(), i, keys);
#pragma unroll
    for (int part = 0; part < Config::CONSUMERS; ++part) {
      load_panels<Config::OWN_PANELS>(Config::values_of(part), i, keys);
    }
  }

  // Loads boxes in which a key exists.
  template <int COUNT>
  __device__ __forceinline__ void load_panels(const PanelGroup& group, int i, int keys) const {
    const int stage = ring_.stage();
    const bool issues = threadIdx.x % 32 == 0;
    const int box = params_.box_keys;  // a power of two
    if (issues) {
      wait_for_place(group);
      const int bytes = (keys + box - 1 & -box) * Tile::ROW_BYTES;
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        mbarrier_expect(shared_address(&smem_.k_full[stage][group.first + j]), bytes);
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int key = 0; key < keys; key += box) {
      const int piece = (i * Config::BLOCK_N + key) / PAGE_STEP;
      BoxPlace at{0, __shfl_sync(0xffffffffu, row_, piece), 0, head_ * params_.k_axes.head_kv,
                  __shfl_sync(0xffffffffu, entry_, piece) * params_.k_axes.batch};
      if (!issues) continue;
#pragma unroll
      for (int j = 0; j < COUNT; ++j) {
        const int panel = group.first + j;
        at.column = panel * Tile::COLUMNS;
        load_box(shared_address(smem_.k[stage]) + panel * Tile::BYTES + key * Tile::ROW_BYTES,
                 params_.k, at, shared_address(&smem_.k_full[stage][panel]));
      }
    }
  }

  const MlaSm90Params& params_;
  Smem& smem_;
  typename Config::Stages ring_;
  int next_entry_, next_row_;  // of this lane's 16 keys of the next key block
  int entry_, row_;            // of those of the key block that is loaded
  int head_;                   // of the key block that is loaded
};

// Loads the queries of a split, one work tile after the other, by the other warps, a row by each.
// Rows that do not exist are zeros.
template <class Config>
__device__ __forceinline__ void load_queries(const DecodeParams& p, typename Config::Smem& smem,
                                             DecodeCursor at, int key_blocks) {
  constexpr int WARPS = Config::QUERY_LOADERS / 32;
  constexpr int ROWS = (Config::BLOCK_ROWS + WARPS - 1) / WARPS;  // of a warp
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
    const int tile_row = at.row0(p) + own_row;
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
    fence_proxy_async();  // wgmma reads what was copied
    mbarrier_arrive(shared_address(&smem.q_full));
  }
}

}  // namespace flash_dist

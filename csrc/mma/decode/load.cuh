// Tiles of K and V on their way from a cache, unit after unit.
#pragma once

#include "core/decode_work.cuh"
#include "core/tile.cuh"
#include "core/views.cuh"

namespace flash_dist {

// Starts the copies of a block's share, one tile a call: the tiles of K of a unit, then those of V.
// Where the keys of the next unit lie is read from the tables while this one is loaded: lane c of
// each warp knows it of the 16 keys with number c.
template <class Config>
class UnitLoader {
  using Target = typename Config::Target;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int BLOCK_N = Config::BLOCK_N;
  static constexpr int PIECES = UNIT_KEYS / PAGE_STEP;
  using Layout = SwizzledRows<HEAD_DIM>;
  static constexpr int LANES = lanes_per_row(Layout::CHUNKS, Config::THREADS);
  static constexpr int ROWS = Config::THREADS / LANES;  // of a pass
  static constexpr int PASSES = BLOCK_N / ROWS;
  static constexpr int CHUNKS = Layout::CHUNKS / LANES;  // of a row, of this thread
  static_assert(BLOCK_N % ROWS == 0 && PAGE_STEP % ROWS == 0);

 public:
  // at: the share's first unit; it has `units`.
  __device__ __forceinline__ UnitLoader(const DecodeParams& p, const DecodeCursor& at,
                                        int64_t units)
      : next_(at), waiting_(units), tile_(2 * Config::TILES) {
    find_next(p);
  }

  // Starts the copy of the next tile to a stage, if there is one.
  __device__ __forceinline__ void fetch(const DecodeParams& p, uint32_t stage) {
    if (tile_ == 2 * Config::TILES) {
      if (waiting_ == 0) return;
      take(p);
    }
    const bool is_v = tile_ >= Config::TILES;
    const View& view = is_v ? p.cache.v : p.cache.k;
    const int key0 = (is_v ? tile_ - Config::TILES : tile_) * BLOCK_N;
    const int columns = is_v ? p.head_dim_v : p.head_dim;
    copy(stage, static_cast<const uint16_t*>(view.data) + head_ * view.head_kv, view, key0,
         columns);
    ++tile_;
  }

 private:
  __device__ __forceinline__ void take(const DecodeParams& p) {
    tile_ = 0;
    --waiting_;
    entry_ = next_entry_;
    row_ = next_row_;
    head_ = next_.head(p);
    key_ = next_.unit * UNIT_KEYS;
    begin_ = next_.extent.begin;
    end_ = next_.extent.seqlen;
    if (waiting_ > 0) {
      next_.advance(p);
      find_next(p);
    }
  }

  __device__ __forceinline__ void find_next(const DecodeParams& p) {
    const int key = next_.unit * UNIT_KEYS + threadIdx.x % PIECES * PAGE_STEP;
    next_entry_ = next_row_ = 0;
    if (waiting_ > 0 && key < next_.extent.seqlen) {
      const CachePlace place(p.cache, next_.batch, next_.extent.leftpad + key);
      next_entry_ = place.entry;
      next_row_ = place.row;
    }
  }

  // Keys [key0, key0 + BLOCK_N) of the unit; those that do not exist are zeros.
  __device__ __forceinline__ void copy(uint32_t stage, const uint16_t* head, const View& view,
                                       int key0, int columns) const {
    const int row = threadIdx.x / LANES;
    const int lane = threadIdx.x % LANES;
    uint4 staged[Target::HAS_CP_ASYNC ? 1 : PASSES * CHUNKS];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int first = key0 + i * ROWS;
      const int entry = __shfl_sync(0xffffffffu, entry_, first / PAGE_STEP);
      const int row0 = __shfl_sync(0xffffffffu, row_, first / PAGE_STEP);
      const int key = key_ + first + row;
      const bool exists = begin_ <= key && key < end_;
      const uint16_t* src =
          head + entry * view.batch + (row0 + first % PAGE_STEP + row) * view.row + lane * 8;
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const int chunk = c * LANES + lane;
        const bool valid = exists && chunk * 8 < columns;
        if constexpr (Target::HAS_CP_ASYNC) {
          cp_async_16(stage + Layout::offset(row, chunk) + i * ROWS * Layout::ROW_BYTES,
                      valid ? src + c * LANES * 8 : head, valid);
        } else {
          staged[i * CHUNKS + c] = valid ? load_global_16(src + c * LANES * 8) : uint4{0, 0, 0, 0};
        }
      }
    }
    if constexpr (!Target::HAS_CP_ASYNC) {
#pragma unroll
      for (int i = 0; i < PASSES * CHUNKS; ++i) {
        store_shared_16(stage + Layout::offset(row, i % CHUNKS * LANES + lane) +
                            i / CHUNKS * ROWS * Layout::ROW_BYTES,
                        staged[i]);
      }
    }
  }

  DecodeCursor next_;
  int64_t waiting_;  // units not begun
  int tile_;         // of the unit that is being loaded
  int entry_, row_;  // of this lane's 16 keys
  int next_entry_, next_row_;
  int head_, key_, begin_, end_;
};

}  // namespace flash_dist

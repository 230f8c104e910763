// Copies tiles of K and V from a cache to shared memory.
#pragma once

#include <type_traits>

#include "core/decode_work.cuh"
#include "core/sequence.cuh"
#include "core/tile.cuh"

namespace flash_dist {

// Starts the copies of a split, one tile per call: the tiles of K of a key block, then its tiles of
// V unless V is part of K. While a key block is loaded, the addresses of the next key block are
// read from block_table: lane c of each warp has the address of the c-th run of 16 contiguous keys.
template <class Config>
class KeyBlockLoader {
  using Target = typename Config::Target;
  static constexpr int BLOCK_N = Config::BLOCK_N;
  static constexpr int PIECES = KEY_BLOCK / PAGE_STEP;
  static constexpr int COPIES =
      Config::V_IN_K ? Config::TILES : 2 * Config::TILES;  // number of copies per key block
  using Layout = typename Config::Layout;
  static constexpr int LANES = lanes_per_row(Layout::CHUNKS, Config::LOADERS);
  static constexpr int ROWS = Config::LOADERS / LANES;  // rows per pass
  static constexpr int PASSES = BLOCK_N / ROWS;
  static constexpr int CHUNKS = Layout::CHUNKS / LANES;  // chunks of a row per thread
  static_assert(BLOCK_N % ROWS == 0 && (PAGE_STEP % ROWS == 0 || ROWS % PAGE_STEP == 0));

 public:
  using Cursor = std::conditional_t<Config::KEEPS_CURSORS, DecodeCursor&, DecodeCursor>;

  // Prepares the copies of a split. at: the first key block of the split; with KEEPS_CURSORS, a
  // variable in shared memory. key_blocks: the number of key blocks of the split.
  __device__ __forceinline__ KeyBlockLoader(const DecodeParams& p, Cursor at, int key_blocks)
      : next_(at), waiting_(key_blocks), tile_(COPIES) {
    find_next(p);
  }

  // Starts the copy of the next tile to a stage, if there is one.
  __device__ __forceinline__ void fetch(const DecodeParams& p, uint32_t stage) {
    if (tile_ == COPIES) {
      if (waiting_ == 0) return;
      take(p);
    }
    const bool is_v = !Config::V_IN_K && tile_ >= Config::TILES;
    const View& view = is_v ? p.cache.v : p.cache.k;
    const int key0 = (is_v ? tile_ - Config::TILES : tile_) * BLOCK_N;
    const int columns = is_v ? p.head_dim_v : p.head_dim;
    const int64_t offset = entry_ * view.batch + row_ * view.row;
    copy(stage, head_begin(view, 0, head_, 0), offset, view.row, key0, columns);
    ++tile_;
  }

 private:
  // Returns the index of this thread among the loading threads, which are the last ones of the
  // block.
  __device__ __forceinline__ static unsigned thread() {
    return threadIdx.x - (Config::THREADS - Config::LOADERS);
  }

  __device__ __forceinline__ void take(const DecodeParams& p) {
    tile_ = 0;
    --waiting_;
    entry_ = next_entry_;
    row_ = next_row_;
    head_ = next_.head;
    const int key = next_.key_block * KEY_BLOCK;
    skipped_ = max(next_.extent.visible_begin - key, 0);
    visible_ = max(next_.extent.visible_end - key - skipped_, 0);
    if (waiting_ > 0) {
      advance_cursor<Config::KEEPS_CURSORS>(p, next_);
      find_next(p);
    }
  }

  __device__ __forceinline__ void find_next(const DecodeParams& p) {
    const int key = next_.key_block * KEY_BLOCK + threadIdx.x % PIECES * PAGE_STEP;
    next_entry_ = next_row_ = 0;
    if (waiting_ > 0 && key < next_.extent.visible_end) {
      const CachePlace place(p.cache, next_.batch, next_.extent.leftpad + key);
      next_entry_ = place.entry;
      next_row_ = place.row;
    }
  }

  // Copies keys [key0, key0 + BLOCK_N) of the key block. Keys that no query attends to become 0.
  __device__ __forceinline__ void copy(uint32_t stage, const uint16_t* head, int64_t offset,
                                       int64_t row_stride, int key0, int columns) const {
    const int row = thread() / LANES;
    const int lane = thread() % LANES;
    const int piece = ROWS > PAGE_STEP ? row / PAGE_STEP : 0;  // run of 16 keys in a pass
    const int64_t own = (row - piece * PAGE_STEP) * row_stride + lane * 8;
    uint4 staged[Target::HAS_CP_ASYNC ? 1 : PASSES * CHUNKS];
#pragma unroll
    for (int i = 0; i < PASSES; ++i) {
      const int first = key0 + i * ROWS;
      const uint16_t* src = head + __shfl_sync(0xffffffffu, offset, first / PAGE_STEP + piece) +
                            first % PAGE_STEP * row_stride + own;
      const bool exists = static_cast<unsigned>(first + row - skipped_) < visible_;
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

  Cursor next_;
  int waiting_;                // number of key blocks whose copies have not started
  int next_entry_, next_row_;  // cache entry and row of this lane's 16 keys in the next key block
  int entry_, row_;            // the same for the key block being loaded
  int tile_, head_;            // key block being loaded: next tile to copy, and kv head
  int skipped_;                // key block being loaded: leading keys that no query attends to
  unsigned visible_;           // number of visible keys after the skipped ones
};

// A ring of tiles of K and V in shared memory. While one tile is used, copies to all other stages
// are in flight.
template <class Config>
class KvRing {
  using Target = typename Config::Target;
  using Loader = KeyBlockLoader<Config>;
  static constexpr int STAGES = Config::STAGES;
  static constexpr int TILE = Config::BLOCK_N * Config::HEAD_DIM;
  static constexpr int STAGE_BYTES = TILE * 2;

 public:
  __device__ __forceinline__ KvRing(const DecodeParams& p, const uint16_t (&ring)[STAGES][TILE],
                                    typename Loader::Cursor at, int key_blocks)
      : loader_(p, at, key_blocks), ring_(shared_address(ring)) {}

  __device__ __forceinline__ void fill(const DecodeParams& p) {
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fetch(p, i);
  }
  // Waits for the next tile and returns its address. All threads have then read the previous tile,
  // so the next copy to its stage is started.
  __device__ __forceinline__ uint32_t next(const DecodeParams& p) {
    if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<STAGES - 2>();
    __syncthreads();
    fetch(p, stage_ == 0 ? STAGES - 1 : stage_ - 1);
    const uint32_t tile = ring_ + stage_ * STAGE_BYTES;
    stage_ = stage_ == STAGES - 1 ? 0 : stage_ + 1;
    return tile;
  }
  __device__ __forceinline__ static void drain() {
    if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  }

 private:
  __device__ __forceinline__ void fetch(const DecodeParams& p, int stage) {
    loader_.fetch(p, ring_ + stage * STAGE_BYTES);
    if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();
  }

  Loader loader_;
  const uint32_t ring_;
  int stage_ = 0;
};

}  // namespace flash_dist

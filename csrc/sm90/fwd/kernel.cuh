// Forward attention on Hopper: out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      one block for each multiprocessor, which takes one tile of queries after the other; or
//           one for each tile, where tiles differ in length and there are no tickets.
// Block     a warpgroup of which one thread loads, and CONSUMERS warpgroups of 64 queries each.
// Shared    Q tile, STAGES tiles of K and of V, the output tile, what the loader says of a tile.
// Pipeline  The copy engine fills the tiles, each announced by a barrier; a consumer warp that has
//           read one says so by another. S = Q @ K(j - 1).T is issued before P @ V(j), so that the
//           matrix units work while the softmax of step j - 1 waits for S alone. Keys are walked
//           from the last to the first, so that causal tiles that need a mask come first. The
//           loader is ahead: the next Q, K and V arrive while the output is written.
//
// Who takes a tile changes nothing in it.
#pragma once

#include "core/blocks.cuh"
#include "core/softmax.cuh"
#include "core/uncovered.cuh"
#include "core/views.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/special.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/fwd/config.h"
#include "sm90/fwd/launch.h"
#include "sm90/stages.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

// The work of the two roles.
template <class Config, int BLOCK_N, Walk WALK>
struct FwdSm90 {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  using Steps = KeySteps<BLOCK_N, WALK>;
  using QTile = Panels<Config::BLOCK_M>;
  using KTile = Panels<BLOCK_N>;
  using Tiles = Ring<Config::STAGES>;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  static constexpr int K_BYTES = Config::template K_BYTES<BLOCK_N>;
  static constexpr int V_BYTES = Config::template V_BYTES<BLOCK_N>;
  static constexpr int NO_TILE = -1;  // in place of a first row

  const FwdSm90Params& params;
  Smem& smem;

  // One thread's work.
  __device__ __forceinline__ void load_all() const {
    const FwdParams& p = params.p;
    FwdSm90Loader& own = smem.loader;
    own = {static_cast<unsigned>(fresh_block()), 0, 0, 0};
    const auto place = [&]() -> FwdSm90Work& {
      const Ring<2> works{own.works};
      mbarrier_wait(shared_address(&smem.work_empty[works.stage()]), works.parity() ^ 1);
      return smem.work[works.stage()];
    };
    const auto announce = [&] {
      mbarrier_arrive(shared_address(&smem.work_full[Ring<2>{own.works}.stage()]));
      ++own.works;
    };
#pragma unroll 1
    while (own.number < static_cast<unsigned>(params.tiles)) {
      FwdSm90Work& work = place();
      work.place_block(p, Config::BLOCK_M, static_cast<int>(own.number));
      own.number = next_tile(own.number);
      if (!work.has_queries() && !work.sequence.uncovered_q) continue;
      work.find_keys(p, Config::BLOCK_M, BLOCK_N);
      work.queries = own.queries;
      work.tiles = own.tiles;
      announce();
      if (work.has_queries() && work.has_keys()) load(work);
    }
    place().block.row0 = NO_TILE;
    announce();
  }

  // A warpgroup's work.
  __device__ __forceinline__ void compute_all() const {
    Ring<2> works;
#pragma unroll 1
    while (true) {
      mbarrier_wait(shared_address(&smem.work_full[works.stage()]), works.parity());
      const FwdSm90Work& work = smem.work[works.stage()];
      if (work.block.row0 == NO_TILE) break;
      if (work.sequence.uncovered_q) fill_uncovered<Config, 2, WARPGROUP>(params.p, work.block);
      if (work.has_queries()) {
        if (work.has_keys()) {
          compute(work);
        } else {
          fill_unseeing(work);
        }
      }
      __syncwarp();
      arrive(smem.work_empty[works.stage()]);
      works.advance();
    }
    wait_until_read<0>();
  }

 private:
  // The first query of this warp in the tile.
  __device__ __forceinline__ static int warp_row() {
    return (fresh_thread() - WARPGROUP) / 32 * 16;
  }

  // One arrival for this warp.
  __device__ __forceinline__ static void arrive(const uint64_t& barrier) {
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&barrier));
  }

  __device__ __forceinline__ unsigned next_tile(unsigned number) const {
    const unsigned blocks = gridDim.x;
    return blocks + (params.tickets == nullptr ? number : atomicAdd(params.tickets, 1u));
  }

  // The tiles of Q, K and V of one tile of queries that sees any key.
  __device__ __forceinline__ void load(const FwdSm90Work& work) const {
    const FwdBlock& block = work.block;
    const Ring<1> queries{work.queries};
    const uint32_t q_full = shared_address(&smem.q_full);
    mbarrier_wait(shared_address(&smem.q_empty), queries.parity() ^ 1);
    mbarrier_expect(q_full, Config::Q_PANELS * QTile::BYTES);
    BoxPlace at{0, work.sequence.q0 + block.row0, block.member * params.q_axes.member,
                block.head_kv * params.q_axes.head_kv, block.batch * params.q_axes.batch};
#pragma unroll
    for (int panel = 0; panel < Config::Q_PANELS; ++panel) {
      at.column = panel * QTile::COLUMNS;
      load_box(shared_address(smem.q) + panel * QTile::BYTES, params.q, at, q_full);
    }
    ++smem.loader.queries;
    Tiles tiles{work.tiles}, before;
    const int last = work.bounds.end - 1;
#pragma unroll 1
    for (int j = last; j >= work.bounds.begin; --j) {
      wait_for_place(smem.k_empty, tiles);
      load_keys<K_BYTES>(shared_address(smem.k[tiles.stage()]), params.k, params.k_axes, work, j,
                         shared_address(&smem.k_full[tiles.stage()]));
      if (j < last) load_values(work, j + 1, before);
      before = tiles;
      tiles.advance();
    }
    load_values(work, work.bounds.begin, before);
    smem.loader.tiles = tiles.passed;
  }

  __device__ __forceinline__ void compute(const FwdSm90Work& work) const {
    const FwdParams& p = params.p;
    Accumulator<1, HEAD_DIM_V / 8> o;
    o.clear();
    SoftmaxState<1> state;
    state.clear();
    walk(work, o, state);

    const int row = work.block.row0 + warp_row();
    float* lse = p.lse + lse_begin(p, work.block.batch, work.block.head, work.sequence.q0) + row;
    normalize_rows(o, state, lse, fresh_thread() % 32, work.sequence.seqlen_q - row,
                   p.softmax_scale);
    store(work, o);
  }

  // Until the consumers have read what lies in the next stage: nothing at first.
  __device__ __forceinline__ void wait_for_place(const uint64_t (&empty)[Config::STAGES],
                                                 const Tiles& tiles) const {
    mbarrier_wait(shared_address(&empty[tiles.stage()]), tiles.parity() ^ 1);
  }

  __device__ __forceinline__ void load_values(const FwdSm90Work& work, int j,
                                              const Tiles& tiles) const {
    wait_for_place(smem.v_empty, tiles);
    load_keys<V_BYTES>(shared_address(smem.v[tiles.stage()]), params.v, params.v_axes, work, j,
                       shared_address(&smem.v_full[tiles.stage()]));
  }

  // The keys of step j of k or v.
  template <int BYTES>
  __device__ __forceinline__ void load_keys(uint32_t tile, const CUtensorMap& map,
                                            const AxisSteps& axes, const FwdSm90Work& work, int j,
                                            uint32_t barrier) const {
    const FwdBlock& block = work.block;
    const Steps steps{work.bounds};
    mbarrier_expect(barrier, BYTES);
    BoxPlace at{0, work.sequence.k0 + steps.key0(j), 0, block.head_kv * axes.head_kv,
                block.batch * axes.batch};
    if (!steps.is_list()) {
#pragma unroll
      for (int panel = 0; panel < BYTES / KTile::BYTES; ++panel) {
        at.column = panel * KTile::COLUMNS;
        load_box(tile + panel * KTile::BYTES, map, at, barrier);
      }
      return;
    }
#pragma unroll
    for (int part = 0; part < Steps::PARTS; ++part) {
      at.row = work.sequence.k0 + steps.key0(j, part);
#pragma unroll
      for (int panel = 0; panel < BYTES / KTile::BYTES; ++panel) {
        at.column = panel * KTile::COLUMNS;
        load_box(tile + panel * KTile::BYTES + part * MASK_TILE * KTile::ROW_BYTES, map, at,
                 barrier);
      }
    }
  }

  __device__ __forceinline__ void walk(const FwdSm90Work& work, Accumulator<1, HEAD_DIM_V / 8>& o,
                                       SoftmaxState<1>& state) const {
    const KeyBounds& bounds = work.bounds;
    const Steps steps{bounds};
    const float scale_log2 = params.p.softmax_scale * LOG2_E;
    const uint64_t a_q =
        QTile::by_rows(shared_address(smem.q) + consumer() * 64 * QTile::ROW_BYTES);
    Accumulator<1, BLOCK_N / 8> s;
    uint32_t probabilities[BLOCK_N / 16][1][4];
    float rescale[1][2];
    Tiles tiles{work.tiles}, before;
    bool clean = true;  // whether all keys of the step before are there to be read

    // S = Q @ K.T                                           [64, BLOCK_N]
    const auto issue_scores = [&] {
      uint64_t a = a_q;
      asm volatile("" : "+l"(a));  // what follows from it is not kept in registers
      const uint64_t b_k = KTile::by_rows(shared_address(smem.k[tiles.stage()]));
      wgmma_fence();
      wgmma<T, false, false, true>(s.x[0], a, b_k);
#pragma unroll
      for (int k = 1; k < HEAD_DIM / 16; ++k) {
        wgmma<T, false, false>(s.x[0], a + QTile::rows_step(k), b_k + KTile::rows_step(k));
      }
      wgmma_commit();
    };
    // O += P @ V                                            [64, HEAD_DIM_V]
    const auto issue_output = [&](int j) {
      mbarrier_wait(shared_address(&smem.v_full[before.stage()]), before.parity());
      if (!clean) clear_values(work, j, before.stage());
      const uint64_t b_v = KTile::by_columns(shared_address(smem.v[before.stage()]));
      hold(probabilities);
      hold(o.x[0]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) {
        wgmma<T, true>(o.x[0], probabilities[k][0], b_v + KTile::columns_step(k));
      }
      wgmma_commit();
    };
    const auto wait_for_keys = [&] {
      mbarrier_wait(shared_address(&smem.k_full[tiles.stage()]), tiles.parity());
    };
    const auto to_operands = [&] {
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) to_a_operand<Target, T>(probabilities[k], s, k);
    };
    const auto test = [&](int j) {
      hide_step(s, Mask(params.p.mask, work.place), steps, j, consumer(),
                work.block.row0 + warp_row());
    };

    int j = bounds.end - 1;
    mbarrier_wait(shared_address(&smem.q_full), Ring<1>{work.queries}.parity());
    wait_for_keys();
    issue_scores();
    wgmma_wait<0>();
    hold(s.x[0]);
    arrive(smem.k_empty[tiles.stage()]);
    if (j >= bounds.full_end || j < bounds.full_begin) {
      test(j);
      clean = is_clean(work, j);
    }
    to_probabilities<Offsets::EXACT, false>(s, state, rescale, scale_log2);
    to_operands();
    before = tiles;
    tiles.advance();
    if (j > bounds.begin) wait_for_keys();

    const auto step = [&](auto masked) {
      constexpr bool MASKED = decltype(masked)::value;
      issue_scores();
      issue_output(j + 1);
      wgmma_wait<1>();
      hold(s.x[0]);
      arrive(smem.k_empty[tiles.stage()]);
      if constexpr (MASKED) test(j);
      clean = !MASKED || is_clean(work, j);
      to_probabilities<Offsets::EXACT, false>(s, state, rescale, scale_log2);
      hold(s.x[0]);
      const int read = before.stage();
      before = tiles;
      tiles.advance();
      // NOTE: here for its jump, too, over which ptxas moves no exponential behind the next wait.
      if (j > bounds.begin) wait_for_keys();
      wgmma_wait<0>();
      hold(o.x[0]);
      hold(probabilities);
      arrive(smem.v_empty[read]);
      to_operands();
      rescale_rows(o, rescale);
    };
    --j;
    if constexpr (WALK == Walk::LISTS) {
#pragma unroll 1
      for (; j >= 0; --j) step(std::true_type{});
    } else {
      // Steps to test, steps to take as they are, steps to test.
#pragma unroll 1
      for (int round = 0; round < 2; ++round) {
#pragma unroll 1
        for (; j >= (round == 0 ? bounds.full_end : bounds.begin); --j) step(std::true_type{});
#pragma unroll 1
        for (; j >= bounds.full_begin; --j) step(std::false_type{});
      }
    }
    if constexpr (!Config::SHARES_Q) arrive(smem.q_empty);
    issue_output(bounds.begin);
    wgmma_wait<0>();
    hold(o.x[0]);
    arrive(smem.v_empty[before.stage()]);
  }

  // Whether all keys of a step may be read: those of a range that does not end within it.
  __device__ __forceinline__ static bool is_clean(const FwdSm90Work& work, int j) {
    const RowSpan& keys = work.keys;
    const Steps steps{work.bounds};
    if (!steps.is_list()) {
      return keys.first <= steps.key0(j) && steps.key0(j) + BLOCK_N <= keys.end;
    }
    // Tiles ascend.
    constexpr int LAST = Steps::PARTS == 0 ? 0 : Steps::PARTS - 1;
    return keys.first <= steps.key0(j, 0) && steps.key0(j, LAST) + MASK_TILE <= keys.end &&
           !steps.lacks(j, LAST);
  }

  // Zeros for the values of keys that are not there: P is 0, but what was copied may be NaN. All
  // consumers come here, with the same step.
  __device__ __forceinline__ void clear_values(const FwdSm90Work& work, int j, int stage) const {
    const RowSpan& keys = work.keys;
    const Steps steps{work.bounds};
    constexpr int CHUNKS = Config::V_PANELS * 8;  // of 16 bytes to a row
#pragma unroll 1
    for (int i = fresh_thread() - WARPGROUP; i < BLOCK_N * CHUNKS;
         i += Config::CONSUMERS * WARPGROUP) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      const int key = steps.key(j, row);
      if (key < keys.first || key >= keys.end) {
        store_shared_16(shared_address(smem.v[stage]) + KTile::offset(row, chunk), {0, 0, 0, 0});
      }
    }
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, Config::CONSUMERS * WARPGROUP);
  }

  // O, rounded, through this warpgroup's rows of the output tile.
  __device__ __forceinline__ void store(const FwdSm90Work& work,
                                        const Accumulator<1, HEAD_DIM_V / 8>& o) const {
    const FwdParams& p = params.p;
    const FwdBlock& block = work.block;
    const bool packed = p.packing.cu_seqlens_q != nullptr;
    const int barrier = ONE_CONSUMER + consumer();
    const int group_row0 = consumer() * 64;
    const uint32_t tile =
        shared_address(Config::SHARES_Q ? smem.q : smem.out) + group_row0 * QTile::ROW_BYTES;
    // The tile before has been read, or all warps are done with Q.
    if (!Config::SHARES_Q && fresh_thread() % WARPGROUP == 0) wait_until_read<0>();
    barrier_sync(barrier, WARPGROUP);
    {
      const int lane = fresh_thread() % 32;
      const int row = fresh_thread() / 32 % WARPS_OF_GROUP * 16 + lane % 16;
#pragma unroll
      for (int k = 0; k < HEAD_DIM_V / 16; ++k) {
        uint32_t r[1][4];
        to_a_operand<Target, T>(r, o, k);
        stmatrix_x4(tile + QTile::offset(row, 2 * k + lane / 16), r[0]);
      }
    }
    const int rows = work.sequence.seqlen_q - block.row0 - group_row0;
    const bool whole = rows >= 64 || !packed;  // or cut off by the map
    fence_proxy_async();
    barrier_sync(barrier, WARPGROUP);
    if (whole) {
      if (fresh_thread() % WARPGROUP == 0) {
        BoxPlace at{0, work.sequence.q0 + block.row0 + group_row0, block.member, block.head_kv,
                    packed ? 0 : block.batch};
#pragma unroll
        for (int panel = 0; panel < Config::V_PANELS; ++panel) {
          at.column = panel * QTile::COLUMNS;
          if (rows > 0) store_box(params.out, at, tile + panel * QTile::BYTES);
        }
        commit_stores();
      }
    } else {
      store_rows(work, tile, rows);
    }
    if constexpr (Config::SHARES_Q) {
      if (fresh_thread() % WARPGROUP == 0) wait_until_read<0>();
      __syncwarp();
      arrive(smem.q_empty);
    }
  }

  // The first `rows` rows of a staged tile.
  __device__ __forceinline__ void store_rows(const FwdSm90Work& work, uint32_t tile,
                                             int rows) const {
    for_chunks(work, rows, [&](uint16_t* out, int row, int chunk) {
      store_global_16(out, load_shared_16(tile + QTile::offset(row, chunk)));
    });
  }

  // Queries that see no key.
  __device__ __forceinline__ void fill_unseeing(const FwdSm90Work& work) const {
    const FwdBlock& block = work.block;
    const int rows = min(work.sequence.seqlen_q - block.row0 - consumer() * 64, 64);
    for_chunks(work, rows, [&](uint16_t* out, int, int) { store_global_16(out, {0, 0, 0, 0}); });
    const int row = fresh_thread() % WARPGROUP;
    float* lse = params.p.lse + lse_begin(params.p, block.batch, block.head, work.sequence.q0) +
                 block.row0 + consumer() * 64;
    if (row < rows) lse[row] = -INFINITY;
  }

  // f(where, row, chunk) for the 16-byte chunks of this warpgroup's first `rows` rows of out.
  template <class F>
  __device__ __forceinline__ void for_chunks(const FwdSm90Work& work, int rows, F f) const {
    const View& view = params.p.out;
    const FwdBlock& block = work.block;
    uint16_t* out = head_begin(view, block.batch, block.head_kv, block.member) +
                    (work.sequence.q0 + block.row0 + consumer() * 64) * view.row;
    constexpr int CHUNKS = HEAD_DIM_V / 8;
#pragma unroll 1
    for (int i = fresh_thread() % WARPGROUP; i < rows * CHUNKS; i += WARPGROUP) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      if (chunk * 8 < params.p.head_dim_v) f(out + row * view.row + chunk * 8, row, chunk);
    }
  }
};

template <class Config>
__device__ __forceinline__ void fwd_sm90_block(const FwdSm90Params& params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    prefetch_map(params.q);
    prefetch_map(params.k);
    prefetch_map(params.v);
    prefetch_map(params.out);
    constexpr int WARPS = Config::CONSUMERS * WARPS_OF_GROUP;
    const auto init = [](const uint64_t& barrier, int arrivals) {
      mbarrier_init(shared_address(&barrier), arrivals);
    };
    init(smem.q_full, 1);
    init(smem.q_empty, WARPS);
    for (int i = 0; i < 2; ++i) {
      init(smem.work_full[i], 1);
      init(smem.work_empty[i], WARPS);
    }
    for (int i = 0; i < Config::STAGES; ++i) {
      init(smem.k_full[i], 1);
      init(smem.v_full[i], 1);
      init(smem.k_empty[i], WARPS);
      init(smem.v_empty[i], WARPS);
    }
    mbarriers_made();
  }
  __syncthreads();

  constexpr bool ONE_WALK = Config::LIST_N == Config::BLOCK_N || Config::LIST_N == 0;
  using Ranges = FwdSm90<Config, Config::BLOCK_N,
                         Config::LIST_N == Config::BLOCK_N ? Walk::BOTH : Walk::RANGES>;
  using Lists = std::conditional_t<ONE_WALK, Ranges, FwdSm90<Config, Config::LIST_N, Walk::LISTS>>;
  const bool ranges = ONE_WALK || params.p.mask.kind != MaskKind::TILES;
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x != 0) return;
    if (ranges) {
      Ranges{params, smem}.load_all();
    } else {
      Lists{params, smem}.load_all();
    }
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    if (ranges) {
      Ranges{params, smem}.compute_all();
    } else {
      Lists{params, smem}.compute_all();
    }
  }
}

}  // namespace flash_dist

// Forward attention on Hopper: out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      x = query tile, batch and query head (of a head the longest causal tiles first).
// Block     a warpgroup of which one thread loads, and CONSUMERS warpgroups of 64 queries each.
// Shared    Q tile (later the output tile), STAGES tiles of K and of V.
// Pipeline  The copy engine fills the tiles, each announced by a barrier; a consumer warp that has
//           read one says so by another. S = Q @ K(j - 1).T is issued before P @ V(j), so that the
//           matrix units work while the softmax of step j - 1 waits for S alone. Keys are walked
//           from the last to the first, so that causal tiles that need a mask come first.
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
#include "sm90/steps.cuh"

namespace flash_dist {

constexpr int WARPGROUP = 128;

// Barriers among consumers, beside __syncthreads().
enum FwdBarrier : int { ALL_CONSUMERS = 1, ONE_CONSUMER };

// The next stage of a ring of tiles, and the parity of the phase in which it is filled.
template <int STAGES>
struct Ring {
  int stage = 0, parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

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

  const FwdSm90Params& params;
  Smem& smem;
  const FwdBlock& block = smem.work.block;
  const Sequence& sequence = smem.work.sequence;
  const KeyBounds& bounds = smem.work.bounds;
  const Steps steps{bounds};

  // One thread's work.
  __device__ __forceinline__ void load() const {
    if (bounds.begin >= bounds.end) return;
    const uint32_t q_full = shared_address(&smem.q_full);
    mbarrier_expect(q_full, Config::Q_PANELS * QTile::BYTES);
#pragma unroll
    for (int panel = 0; panel < Config::Q_PANELS; ++panel) {
      load_box(shared_address(smem.q) + panel * QTile::BYTES, params.q, query_place(panel, 0),
               q_full);
    }
    Tiles tiles, before;
#pragma unroll 1
    for (int j = bounds.end - 1; j >= bounds.begin; --j) {
      wait_for_place(smem.k_empty, tiles);
      load_keys<K_BYTES>(shared_address(smem.k[tiles.stage]), params.k, params.k_axes, j,
                         shared_address(&smem.k_full[tiles.stage]));
      if (j < bounds.end - 1) load_values(j + 1, before);
      before = tiles;
      tiles.advance();
    }
    load_values(bounds.begin, before);
  }

  // A warpgroup's work.
  __device__ __forceinline__ void compute() const {
    const FwdParams& p = params.p;
    Accumulator<1, HEAD_DIM_V / 8> o;
    o.clear();
    SoftmaxState<1> state;
    state.clear();
    walk(o, state);

    const int warp_row0 = first_row();
    const int rows = sequence.seqlen_q - warp_row0;
    normalize_rows(o, state,
                   p.lse + lse_begin(p, block.batch, block.head, sequence.q0) + warp_row0,
                   fresh_thread() % 32, rows,
                   p.softmax_scale);
    store(o);
  }

 private:
  // Number of this warpgroup among the consumers, and the first query of this warp.
  __device__ __forceinline__ static int number() { return fresh_thread() / WARPGROUP - 1; }
  __device__ __forceinline__ int first_row() const {
    return block.row0 + (fresh_thread() - WARPGROUP) / 32 * 16;
  }

  __device__ __forceinline__ BoxPlace query_place(int panel, int row) const {
    return {panel * QTile::COLUMNS, sequence.q0 + block.row0 + row,
            block.member * params.q_axes.member, block.head_kv * params.q_axes.head_kv,
            block.batch * params.q_axes.batch};
  }

  // Until the consumers have read what lies in the next stage: nothing at first.
  __device__ __forceinline__ void wait_for_place(const uint64_t (&empty)[Config::STAGES],
                                                 const Tiles& tiles) const {
    mbarrier_wait(shared_address(&empty[tiles.stage]), tiles.parity ^ 1);
  }

  __device__ __forceinline__ void load_values(int j, const Tiles& tiles) const {
    wait_for_place(smem.v_empty, tiles);
    load_keys<V_BYTES>(shared_address(smem.v[tiles.stage]), params.v, params.v_axes, j,
                       shared_address(&smem.v_full[tiles.stage]));
  }

  // The keys of step j of k or v.
  template <int BYTES>
  __device__ __forceinline__ void load_keys(uint32_t tile, const CUtensorMap& map,
                                            const AxisSteps& axes, int j, uint32_t barrier) const {
    mbarrier_expect(barrier, BYTES);
    BoxPlace at{0, sequence.k0 + steps.key0(j), 0, block.head_kv * axes.head_kv,
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
      at.row = sequence.k0 + steps.key0(j, part);
#pragma unroll
      for (int panel = 0; panel < BYTES / KTile::BYTES; ++panel) {
        at.column = panel * KTile::COLUMNS;
        load_box(tile + panel * KTile::BYTES + part * MASK_TILE * KTile::ROW_BYTES, map, at,
                 barrier);
      }
    }
  }

  __device__ __forceinline__ void walk(Accumulator<1, HEAD_DIM_V / 8>& o, SoftmaxState<1>& state) const {
    if (bounds.begin >= bounds.end) return;
    const float scale_log2 = params.p.softmax_scale * LOG2_E;
    const uint64_t a_q =
        QTile::by_rows(shared_address(smem.q) + number() * 64 * QTile::ROW_BYTES);
    Accumulator<1, BLOCK_N / 8> s;
    uint32_t probabilities[BLOCK_N / 16][1][4];
    float rescale[1][2];
    Tiles tiles, before;
    bool clean = true;  // whether all keys of the step before are there to be read

    // S = Q @ K.T                                           [64, BLOCK_N]
    const auto issue_scores = [&] {
      const uint64_t b_k = KTile::by_rows(shared_address(smem.k[tiles.stage]));
      wgmma_fence();
      wgmma<T, false, false, true>(s, a_q, b_k);
#pragma unroll
      for (int k = 1; k < HEAD_DIM / 16; ++k) {
        wgmma<T, false, false>(s, a_q + QTile::rows_step(k), b_k + KTile::rows_step(k));
      }
      wgmma_commit();
    };
    // O += P @ V                                            [64, HEAD_DIM_V]
    const auto issue_output = [&](int j) {
      mbarrier_wait(shared_address(&smem.v_full[before.stage]), before.parity);
      if (!clean) clear_values(j, before.stage);
      const uint64_t b_v = KTile::by_columns(shared_address(smem.v[before.stage]));
      hold(probabilities);
      hold(o);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) {
        wgmma<T, true>(o, probabilities[k][0], b_v + KTile::columns_step(k));
      }
      wgmma_commit();
    };
    const auto release = [&](const uint64_t (&empty)[Config::STAGES], int stage) {
      if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&empty[stage]));
    };
    const auto wait_for_keys = [&] {
      mbarrier_wait(shared_address(&smem.k_full[tiles.stage]), tiles.parity);
    };
    const auto to_operands = [&] {
#pragma unroll
      for (int k = 0; k < BLOCK_N / 16; ++k) to_a_operand<Target, T>(probabilities[k], s, k);
    };
    const auto test = [&](int j) {
      hide_step(s, Mask(params.p.mask, smem.work.place), steps, j, number(), first_row());
    };

    int j = bounds.end - 1;
    mbarrier_wait(shared_address(&smem.q_full), 0);
    wait_for_keys();
    issue_scores();
    wgmma_wait<0>();
    hold(s);
    release(smem.k_empty, tiles.stage);
    if (j >= bounds.full_end || j < bounds.full_begin) {
      test(j);
      clean = is_clean(j);
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
      hold(s);
      release(smem.k_empty, tiles.stage);
      if constexpr (MASKED) test(j);
      clean = !MASKED || is_clean(j);
      to_probabilities<Offsets::EXACT, false>(s, state, rescale, scale_log2);
      hold(s);
      const int read = before.stage;
      before = tiles;
      tiles.advance();
      // NOTE: here for its jump, too, over which ptxas moves no exponential behind the next wait.
      if (j > bounds.begin) wait_for_keys();
      wgmma_wait<0>();
      hold(o);
      hold(probabilities);
      release(smem.v_empty, read);
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
        const int tested_until = round == 0 ? bounds.full_end : bounds.begin;
#pragma unroll 1
        for (; j >= tested_until; --j) step(std::true_type{});
#pragma unroll 1
        for (; j >= bounds.full_begin; --j) step(std::false_type{});
      }
    }
    issue_output(bounds.begin);
    wgmma_wait<0>();
    hold(o);
  }

  // Whether all keys of a step may be read: those of a range that does not end within it.
  __device__ __forceinline__ bool is_clean(int j) const {
    const RowSpan& keys = smem.work.keys;
    if (!steps.is_list()) {
      return keys.first <= steps.key0(j) && steps.key0(j) + BLOCK_N <= keys.end;
    }
    // Tiles ascend.
    return keys.first <= steps.key0(j, 0) &&
           steps.key0(j, max(Steps::PARTS - 1, 0)) + MASK_TILE <= keys.end;
  }

  // Zeros for the values of keys that are not there: P is 0, but what was copied may be NaN. All
  // consumers come here, with the same step.
  __device__ __forceinline__ void clear_values(int j, int stage) const {
    const RowSpan& keys = smem.work.keys;
    constexpr int CHUNKS = Config::V_PANELS * 8;  // of 16 bytes to a row
#pragma unroll 1
    for (int i = fresh_thread() - WARPGROUP; i < BLOCK_N * CHUNKS;
         i += Config::CONSUMERS * WARPGROUP) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      const int key = steps.is_list() ? steps.key0(j, row / MASK_TILE) + row % MASK_TILE
                           : steps.key0(j) + row;
      if (key < keys.first || key >= keys.end) {
        store_shared_16(shared_address(smem.v[stage]) + KTile::offset(row, chunk), {0, 0, 0, 0});
      }
    }
    fence_proxy_async();
    barrier_sync(ALL_CONSUMERS, Config::CONSUMERS * WARPGROUP);
  }

  // O, rounded, through this warpgroup's rows of Q, which only it has read.
  __device__ __forceinline__ void store(const Accumulator<1, HEAD_DIM_V / 8>& o) const {
    const FwdParams& p = params.p;
    const int lane = fresh_thread() % 32;
    const int warp = fresh_thread() / 32 % 4;
    const int barrier = ONE_CONSUMER + number();
    const int group_row0 = number() * 64;
    const uint32_t tile = shared_address(smem.q) + group_row0 * QTile::ROW_BYTES;
    barrier_sync(barrier, WARPGROUP);  // all warps are done with Q
#pragma unroll
    for (int k = 0; k < HEAD_DIM_V / 16; ++k) {
      uint32_t r[1][4];
      to_a_operand<Target, T>(r, o, k);
      stmatrix_x4(tile + QTile::offset(warp * 16 + lane % 16, 2 * k + lane / 16), r[0]);
    }
    const int rows = sequence.seqlen_q - block.row0 - group_row0;
    const bool whole = rows >= 64 || p.packing.cu_seqlens_q == nullptr;  // or cut off by the map
    if (whole) fence_proxy_async();
    barrier_sync(barrier, WARPGROUP);
    if (whole) {
      if (fresh_thread() % WARPGROUP != 0 || rows <= 0) return;
#pragma unroll
      for (int panel = 0; panel < Config::V_PANELS; ++panel) {
        const BoxPlace at{panel * QTile::COLUMNS, sequence.q0 + block.row0 + group_row0,
                          block.member, block.head_kv,
                          p.packing.cu_seqlens_q == nullptr ? block.batch : 0};
        store_box(params.out, at, tile + panel * QTile::BYTES);
      }
      commit_stores();
      wait_until_read<0>();
      return;
    }
    constexpr int CHUNKS = HEAD_DIM_V / 8;
    uint16_t* out = head_begin(p.out, block.batch, block.head_kv, block.member) +
                    (sequence.q0 + block.row0 + group_row0) * p.out.row;
#pragma unroll 1
    for (int i = fresh_thread() % WARPGROUP; i < rows * CHUNKS; i += WARPGROUP) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      if (chunk * 8 < p.head_dim_v) {
        store_global_16(out + row * p.out.row + chunk * 8,
                        load_shared_16(tile + QTile::offset(row, chunk)));
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void fwd_sm90_block(const FwdSm90Params& params) {
  const FwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const FwdBlock block(p, Config::BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (sequence.uncovered_q) fill_uncovered<Config, 2>(p, block);
  if (block.row0 >= sequence.seqlen_q) return;

  const bool list = Config::LIST_N != 0 && p.mask.kind == MaskKind::TILES;
  if (threadIdx.x == 0) {
    prefetch_map(params.q);
    prefetch_map(params.k);
    prefetch_map(params.v);
    mbarrier_init(shared_address(&smem.q_full), 1);
#pragma unroll
    for (int i = 0; i < Config::STAGES; ++i) {
      mbarrier_init(shared_address(&smem.k_full[i]), 1);
      mbarrier_init(shared_address(&smem.v_full[i]), 1);
      mbarrier_init(shared_address(&smem.k_empty[i]), Config::CONSUMERS * 4);
      mbarrier_init(shared_address(&smem.v_empty[i]), Config::CONSUMERS * 4);
    }
    mbarriers_made();
    smem.work = FwdSm90Work(p, block, sequence, Config::BLOCK_M,
                            list ? Config::LIST_N : Config::BLOCK_N);
  }
  __syncthreads();

  constexpr bool SAME = Config::LIST_N == Config::BLOCK_N || Config::LIST_N == 0;
  using Ranges = FwdSm90<Config, Config::BLOCK_N,
                         Config::LIST_N == Config::BLOCK_N ? Walk::BOTH : Walk::RANGES>;
  using Lists = std::conditional_t<SAME, Ranges, FwdSm90<Config, Config::LIST_N, Walk::LISTS>>;
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x != 0) return;
    if (SAME || !list) {
      Ranges{params, smem}.load();
    } else {
      Lists{params, smem}.load();
    }
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    if (SAME || !list) {
      Ranges{params, smem}.compute();
    } else {
      Lists{params, smem}.compute();
    }
  }
}

}  // namespace flash_dist

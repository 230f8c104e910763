// Forward attention on mma.sync: out = softmax(q @ k.T * softmax_scale) @ v and lse.
//
// Grid      x = query tile (the last first: it is the longest if causal), batch and query head.
// Block     SPLIT = 1: a warp owns ROWS query rows over the whole head_dim. P stays in its
//           registers as the A operand. SPLIT > 1: O of whole rows would take all registers, so
//           SPLIT warps share ROWS queries. Each computes S for part of the keys, exchanges row
//           maxima and P through shared memory, and accumulates part of the columns.
// Shared    Q tile (reused for the output), one K tile, one V tile; if SPLIT > 1 also P.
// Pipeline  V(j) is copied during S = Q @ K(j).T, K(j - 1) during the softmax and P @ V(j). Key
//           blocks run from last to first: the few that a causal mask cuts come first, and the long
//           loop after them applies no mask.
#pragma once

#include "core/blocks.cuh"
#include "core/fwd_steps.cuh"
#include "core/softmax.cuh"
#include "core/uncovered.cuh"
#include "mma/fragments.cuh"
#include "mma/fwd/config.h"

namespace flash_dist {

template <bool FIRST, class T>
__device__ __forceinline__ const T& pick(const T& first, const T& second) {
  if constexpr (FIRST) {
    return first;
  } else {
    return second;
  }
}

// O of a warp's queries. With SPLIT > 1, only the warp's part of the columns.
template <class Config>
using FwdSum = Accumulator<Config::ROW_TILES, Config::HEAD_DIM_V / 8 / Config::SPLIT>;

// The data exchange of SPLIT warps that share queries.
template <class Config>
struct FwdTeam {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using State = SoftmaxState<Config::ROW_TILES>;
  static constexpr int MT = Config::ROW_TILES;
  static constexpr int BLOCKS = Config::BLOCK_N / 16;  // blocks of 16 keys per tile
  typename Config::Smem& smem;
  int lane, part, number, row0;

  __device__ __forceinline__ explicit FwdTeam(typename Config::Smem& shared)
      : smem(shared),
        lane(threadIdx.x % 32),
        part(threadIdx.x / 32 % Config::SPLIT),
        number(threadIdx.x / 32 / Config::SPLIT),
        row0(number * Config::ROWS) {}

  // Stores row maxima over the warp's keys. find_top_of_all() may read them after a barrier.
  template <int NT>
  __device__ __forceinline__ void store_tops(const Accumulator<MT, NT>& s) const {
    each_row([&](int m, int h) { store(m, h, find_top(s, -INFINITY, m, h)); });
  }
  __device__ __forceinline__ float find_top_of_all(float top, int m, int h) const {
#pragma unroll
    for (int i = 0; i < Config::SPLIT; ++i) top = fmaxf(top, smem.exchange.rows[i][row(m, h)]);
    return top;
  }

  // Stores P of the warp's keys, and waits for the other warps of the team.
  template <int NT>
  __device__ __forceinline__ void exchange_weights(const Accumulator<MT, NT>& s) const {
    put_fragments<Target, T, BLOCKS>(weights(), s, part);
    meet<Config>(number);
  }
  __device__ __forceinline__ void load_weights(uint32_t (&rP)[MT][4], int k) const {
#pragma unroll
    for (int m = 0; m < MT; ++m) get_fragment(rP[m], weights() + (m * BLOCKS + k) * FRAGMENT_BYTES);
  }

  // Adds the row sums of all warps of the team.
  __device__ __forceinline__ void add_sums(State& state) const {
    each_row([&](int m, int h) { store(m, h, quad_sum(state.row_sum[m][h])); });
    meet<Config>(number);
    each_row([&](int m, int h) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < Config::SPLIT; ++i) sum += smem.exchange.rows[i][row(m, h)];
      state.row_sum[m][h] = lane % 4 == 0 ? sum : 0.0f;  // the row's other lanes add 0
    });
  }

 private:
  __device__ __forceinline__ int row(int m, int h) const {
    return row0 + m * 16 + h * 8 + lane / 4;
  }
  __device__ __forceinline__ void store(int m, int h, float x) const {
    if (lane % 4 == 0) smem.exchange.rows[part][row(m, h)] = x;
  }
  __device__ __forceinline__ uint32_t weights() const {
    return shared_address(smem.exchange.p) + number * MT * BLOCKS * FRAGMENT_BYTES + lane * 16;
  }
  template <class F>
  __device__ __forceinline__ static void each_row(F f) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) f(m, h);
  }
};

// Writes out = O / sum and lse = max * scale + ln(sum). part: the warp's part of the columns.
template <class Config>
__device__ __forceinline__ void store_output(const FwdParams& p, const FwdBlock& block,
                                             const Sequence& sequence, FwdSum<Config>& o,
                                             const SoftmaxState<Config::ROW_TILES>& softmax,
                                             int warp_row0, int part, int lane, uint32_t sQ) {
  constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  const int first_row = block.row0 + warp_row0;
  const int rows_left = sequence.seqlen_q - first_row;
  float* gLse = p.lse + lse_begin(p, block.batch, block.head, sequence.q0) + first_row;
  const float* sink = p.sinks == nullptr ? nullptr : p.sinks + block.head;
  normalize_rows(o, softmax, gLse, lane, part == 0 ? rows_left : 0, p.scores.scale, sink);
  store_sum<Config, HEAD_DIM_V>(o, sQ + warp_row0 * HEAD_DIM_V * 2, part,
                                head_begin(p.out, block.batch, block.head_kv, block.head_in_group) +
                                    (sequence.q0 + first_row) * p.out.row,
                                p.out.row, rows_left, p.head_dim_v);
}

// Copies the block's queries to shared memory.
template <class Config>
__device__ __forceinline__ void load_queries(const FwdParams& p, const FwdBlock& block,
                                             const Sequence& sequence, uint32_t sQ) {
  TileCopy<typename Config::Target, Config::BLOCK_M, Config::HEAD_DIM, Config::THREADS> copy;
  const uint16_t* rows = head_begin(p.q, block.batch, block.head_kv, block.head_in_group) +
                         (sequence.q0 + block.row0) * p.q.row;
  copy.fetch(sQ, rows, p.q.row, {0, sequence.seqlen_q - block.row0}, p.head_dim);
  copy.land(sQ);
  commit_copies<typename Config::Target>();
}

// The mainloop over key blocks, from last to first. mine: a copy of `work` in registers.
template <class Config>
__device__ __forceinline__ void mainloop(const FwdParams& p, typename Config::Smem& smem,
                                         int warp_row0,
                                         const FwdWork<Config::BLOCK_M, Config::BLOCK_N>& mine,
                                         const FwdWork<Config::BLOCK_M, Config::BLOCK_N>& work,
                                         FwdSum<Config>& o,
                                         SoftmaxState<Config::ROW_TILES>& state) {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Queries = Operand<Config::HEAD_DIM>;
  constexpr int BLOCK_N = Config::BLOCK_N;
  constexpr int NT = Config::KEYS / 8;
  constexpr int SPLIT = Config::SPLIT;
  const FwdTeam<Config> team(smem);
  const int part = SPLIT == 1 ? 0 : team.part;
  const uint32_t sK = shared_address(smem.k);
  const uint32_t sV = shared_address(smem.v);
  const auto a_q = Queries::a(shared_address(smem.q) + warp_row0 * Config::HEAD_DIM * 2);
  const auto b_k = NT == 1 ? Queries::b_8(sK) : Queries::b(sK);
  const auto b_v = share(Operand<Config::HEAD_DIM_V>::b_trans(sV), part);
  const float scale_log2 = p.scores.scale * LOG2_E;
  TileCopy<Target, BLOCK_N, Config::HEAD_DIM, Config::THREADS> copy_k;
  TileCopy<Target, BLOCK_N, Config::HEAD_DIM_V, Config::THREADS> copy_v;
  const auto fetch_k = [&](const auto& w, int key0) {
    copy_k.fetch(sK, w.k + key0 * p.k.row, p.k.row, {w.keys.first - key0, w.keys.end - key0},
                 p.head_dim);
  };
  const auto fetch_v = [&](const auto& w, int key0) {
    copy_v.fetch(sV, w.v + key0 * p.v.row, p.v.row, {w.keys.first - key0, w.keys.end - key0},
                 p.head_dim_v);
  };
  int j = mine.blocks.end - 1;
  if (j >= mine.blocks.begin) {
    const int key0 = mine.blocks.key0(j);
    fetch_k(mine, key0);
    copy_k.land(sK);
    commit_copies<Target>();
    fetch_v(mine, key0);
    commit_copies<Target>();
    wait_for_copies<Target, 1>();
  } else {
    wait_for_copies<Target>();  // the copies of Q must not land later: out is staged in Q's memory
  }

  // Before each step, K(j) has landed and V(j) is in flight.
  const auto step = [&](auto masked) {
    constexpr bool MASKED = decltype(masked)::value;
    // Blocks without a mask are always part of a range, not of a list.
    const auto key0 = [&](int i) { return MASKED ? work.blocks.key0(i) : i * BLOCK_N; };

    // S = Q @ K.T                                        [ROWS, KEYS] per warp
    Accumulator<Config::ROW_TILES, NT> s;
    s.clear();
    if constexpr (MASKED)
      add_bias<T, BeginWithBias, !Config::DROPS>(s, p, Config::BLOCK_M, warp_row0,
                                                 key0(j) + part * Config::KEYS);
    gemm_abt<Target, T, Config::HEAD_DIM, Config::UNROLL>(s, a_q, b_k, part * Config::KEYS);
    const auto mask = [&] {
      if constexpr (MASKED) {
        modify_and_mask<Config::DROPS ? Tanh::NONE : Tanh::FAST, T, Config::DROPS>(
            s, p, work, warp_row0, j, part * Config::KEYS);
      }
    };
    if constexpr (SPLIT > 1) {
      mask();
      team.store_tops(s);
    }
    copy_v.land(sV);
    wait_for_copies<Target>();  // V(j) has landed; all warps have read K(j)
    if (j > work.blocks.begin) fetch_k(work, key0(j - 1));
    commit_copies<Target>();
    if constexpr (SPLIT > 1) {
      online_softmax(s, o, state, scale_log2,
                     [&](int m, int h) { return team.find_top_of_all(state.row_max[m][h], m, h); });
      team.exchange_weights(s);
    } else {
      mask();
      online_softmax(s, o, state, scale_log2);
    }

    // O += P @ V                                         [ROWS, HEAD_DIM_V / SPLIT] per warp
    [[maybe_unused]] DropoutPlace place;
    if constexpr (Config::DROPS) place = dropout_place(p, Config::BLOCK_M, warp_row0, key0(j));
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k) {
      uint32_t rP[Config::ROW_TILES][4];
      if constexpr (SPLIT > 1) {
        team.load_weights(rP, k);
      } else {
        to_a_operand<Target, T>(rP, s, k);
      }
      if constexpr (Config::DROPS) {
        drop_operand(rP, dropout_of(p), {place.sequence_head, place.row0, place.key0 + k * 16});
      }
      gemm_ab_step<Target, T, Config::HEAD_DIM_V, SPLIT>(o, rP, b_v, k * 16);
    }
    if (j > work.blocks.begin) {
      copy_k.land(sK);
      wait_for_copies<Target>();  // K(j - 1) has landed; all warps have read V(j)
      fetch_v(work, key0(j - 1));
      commit_copies<Target>();
    }
  };
  for_key_blocks<Config::DROPS>(p, work.blocks, j, step);
  if constexpr (SPLIT > 1) team.add_sums(state);
}

template <class Config>
__device__ __forceinline__ void fwd_block(const FwdParams& p) {
  constexpr int BLOCK_M = Config::BLOCK_M;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const uint32_t sQ = shared_address(smem.q);
  const int warp_row0 = (threadIdx.x / 32 / Config::SPLIT) * Config::ROWS;
  const int part = threadIdx.x / 32 % Config::SPLIT;
  const int lane = threadIdx.x % 32;

  const FwdBlock block(p, BLOCK_M);
  const Sequence sequence(p, block.batch);
  if (sequence.uncovered_q) fill_uncovered<Config, 2>(p, block);
  if (block.row0 >= sequence.seqlen_q) return;
  load_queries<Config>(p, block, sequence, sQ);
  const FwdWork<BLOCK_M, Config::BLOCK_N> mine(p, block, sequence);
  if (threadIdx.x == 0) smem.work = mine;
  // With SHARES_WORK, each step reads the work from shared memory, to save registers.
  const auto& work = pick<Config::SHARES_WORK>(smem.work, mine);

  FwdSum<Config> o;
  o.clear();
  SoftmaxState<Config::ROW_TILES> state;
  state.clear();
  mainloop<Config>(p, smem, warp_row0, mine, work, o, state);
  const FwdBlock again(p, BLOCK_M);
  const Sequence rows(p, again.batch);
  if constexpr (Config::DROPS) o.scale(dropout_of(p).scale);
  store_output<Config>(p, again, rows, o, state, warp_row0, part, lane, sQ);
}

}  // namespace flash_dist

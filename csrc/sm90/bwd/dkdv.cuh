// dK and dV on Hopper, and dS for the dQ product: the key side of the backward. No atomics: a block
// owns its keys.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// Grid      x = key tile, (batch, kv head) unit of the chunk, group split.
// Block     a warpgroup of which one thread loads, and 2 warpgroups of 64 keys each, which leave out
//           tiles that are masked for theirs; P^T and dS^T stay in their registers as A operands.
// Shared    K and V (for the whole life of the block), STAGES stages of Q, dO, lse and delta.
// Pipeline  The query tiles of every query head of the split, in ascending order: this is the order
//           of summation. dP^T is computed while P^T is, and dV while dS^T is. Between query
//           chunks the sums are kept in memory.
//
// Where both sums are more than the registers of a block, two share the keys (dkdv_pair.cuh).
#pragma once

#include "sm90/bwd/dkdv_steps.cuh"

namespace flash_dist {

template <class Config>
struct DkdvSm90 {
  using Steps = DkdvSm90Steps<Config>;
  using Scores = typename Steps::Scores;
  using Fragments = typename Steps::Fragments;
  using StageStatistics = typename Steps::StageStatistics;
  using DkSum = typename Steps::DkSum;
  using DvSum = typename Steps::DvSum;
  using Stages = Ring<Config::STAGES>;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int PANELS = Config::PANELS;
  static constexpr int V_PANELS = Config::V_PANELS;
  static constexpr int KEYS = 64;  // of a warpgroup
  using DkSum = Accumulator<1, HEAD_DIM / 8>;
  using DvSum = Accumulator<1, HEAD_DIM_V / 8>;
  using Scores = Accumulator<1, BLOCK_M / 8>;
  using Fragments = uint32_t[BLOCK_M / 16][1][4];
  using Statistics = float2[BLOCK_M / 8];
  // In fp16, P^T of modified scores is 2^8 P^T: below 2^-14 what dS^T is made of would lose bits.
  static constexpr int SCORE_MOD_SHIFT =
      Config::HAS_SCORE_MOD && std::is_same_v<T, Fp16> ? 8 : 0;  // log2; dV is scaled back

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;
  const Steps steps{params, smem};

  // Loads, in one thread.
  __device__ __forceinline__ void load() const {
    if (work.items == 0) return;
    steps.load_keys();
    DkdvCursor<Config> cursor(p, work);
    Stages stages;
#pragma unroll 1
    for (int i = 0; i < work.items; ++i, stages.advance()) {
      smem.barriers.wait_for_place(stages);
      steps.note(smem.item[stages.stage()], cursor);
      steps.load_queries(cursor, stages.stage());
      cursor.next(p, work);
    }
  }

  // Computes, in a warpgroup of 64 keys.
  __device__ __forceinline__ void compute() const {
    DkSum dk;
    DvSum dv;
    dk.clear();
    dv.clear();
    if (!p.sums_first) {
      steps.each_partial(dk, p.dk_partial,
                         [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
      steps.each_partial(dv, p.dv_partial,
                         [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
    }
    walk(dk, dv);
    if (SCORE_MOD_SHIFT != 0 && p.sums_last) dv.scale(1.0f / (1 << SCORE_MOD_SHIFT));
    store(dk, dv);
  }

 protected:
  // The first of this warpgroup's keys in the block.
  __device__ __forceinline__ static int group_row0() { return consumer() * KEYS; }
  // Those rows of K and V.
  __device__ __forceinline__ uint32_t own_k() const {
    return shared_address(smem.k) + group_row0() * KTile::ROW_BYTES;
  }
  __device__ __forceinline__ uint32_t own_v() const {
    return shared_address(smem.v) + group_row0() * KTile::ROW_BYTES;
  }

  template <int COUNT, int PANEL_BYTES>
  __device__ __forceinline__ static void load_panels(uint32_t tile, const CUtensorMap& map,
                                                     BoxPlace at, uint32_t barrier) {
#pragma unroll
    for (int panel = 0; panel < COUNT; ++panel) {
      at.column = panel * KTile::COLUMNS;
      load_box(tile + panel * PANEL_BYTES, map, at, barrier);
    }
  }

  // Where the block's keys are in K or V, and a stage's queries in Q or dO.
  __device__ __forceinline__ BoxPlace place_of_keys(const AxisSteps& axes) const {
    const DkdvBlock& block = work.block;
    return {0, work.sequence.k0 + block.key0, 0, block.head_kv * axes.head_kv,
            block.batch * axes.batch};
  }
  __device__ __forceinline__ BoxPlace place_of_queries(const AxisSteps& axes, int row0,
                                                       int group_head) const {
    const DkdvBlock& block = work.block;
    return {0, work.sequence.q0 + row0, group_head * axes.member, block.head_kv * axes.head_kv,
            block.batch * axes.batch};
  }

  // Loads K and V of the block's keys, to stay there.
  __device__ __forceinline__ void load_keys() const {
    const uint32_t full = shared_address(&smem.keys_full);
    mbarrier_expect(full, (PANELS + V_PANELS) * KTile::BYTES);
    load_panels<PANELS, KTile::BYTES>(shared_address(smem.k), params.k,
                                      place_of_keys(params.k_axes), full);
    load_panels<V_PANELS, KTile::BYTES>(shared_address(smem.v), params.v,
                                        place_of_keys(params.v_axes), full);
  }

  // What the item that the cursor is at is.
  __device__ __forceinline__ void note(DkdvItem& item, const Cursor& cursor) const {
    item.row0 = cursor.row0();
    item.group_head = cursor.group_head;
    item.slot[0] = cursor.slot(p, work, 0);
    item.slot[1] = cursor.slot(p, work, 1);
    const int4* known = cursor.known(p, work);
    if (known != nullptr) item.known = *known;
  }

  // Q, dO, lse and delta of the item that the cursor is at.
  __device__ __forceinline__ void load_queries(const Cursor& cursor, int s) const {
    const int row0 = cursor.row0();
    const int group_head = cursor.group_head;

    constexpr int STATISTICS = BLOCK_M * sizeof(float);
    const uint32_t full = shared_address(&smem.barriers.full[s]);
    mbarrier_expect(full, (PANELS + V_PANELS) * QTile::BYTES + 2 * STATISTICS);
    load_panels<PANELS, QTile::BYTES>(shared_address(smem.stage[s].q), params.q,
                                      place_of_queries(params.q_axes, row0, group_head), full);
    const int64_t statistics =
        work.statistics + static_cast<int64_t>(group_head) * p.rows_padded + row0;
    load_bytes(shared_address(smem.lse_log2[s]), p.lse_log2 + statistics, STATISTICS, full);
    load_panels<V_PANELS, QTile::BYTES>(shared_address(smem.stage[s].dout), params.dout,
                                        place_of_queries(params.dout_axes, row0, group_head), full);
    load_bytes(shared_address(smem.delta[s]), p.delta + statistics, STATISTICS, full);
  }

 private:
  __device__ __forceinline__ void mainloop(DkSum& dk, DvSum& dv) const {
    if (work.items == 0) return;
    mbarrier_wait(shared_address(&smem.keys_full), 0);
    steps.clear_keys();
    Stages stages;
#pragma unroll 1
    for (int left = work.items; left > 0; --left, stages.advance()) {
      smem.barriers.wait_for_data(stages);
      const int s = stages.stage();
      const int code = tile_code(p, work, smem.item[s], consumer());
      if (code != TILE_EMPTY) {
        steps.clear_queries(s, smem.item[s].row0);
        add(dk, dv, s, code);
      }
      smem.barriers.release(s);
    }
  }

  // Adds stage s to the sums.
  __device__ __forceinline__ void add(DkSum& dk, DvSum& dv, int s, int code) const {
    const uint32_t q = uniform(shared_address(smem.stage[s].q));
    const uint32_t dout = uniform(shared_address(smem.stage[s].dout));
    Scores pt, dst;
    Fragments probabilities, gradients;
    Fragments products;  // of modified scores: what dS^T is made of
    const float slope = slope_of(smem.item[s]);
    // S^T = K @ Q.T                                       [64, BLOCK_M]
    Steps::template issue_scores<Config::HEAD_DIM>(pt, uniform(steps.own_k()), q);
    // dP^T = V @ dO.T                                     [64, BLOCK_M]
    const auto issue_gradients = [&] {
      Steps::template issue_scores<Config::HEAD_DIM_V>(dst, uniform(steps.own_v()), dout);
    };
    if constexpr (Config::SCORES_AT_A_TIME == 2) issue_gradients();
    wgmma_wait<Config::SCORES_AT_A_TIME - 1>();
    hold(pt.x[0]);
    if constexpr (Config::HAS_SCORE_MOD) begin_softcap(pt, params.score_mod);
    if (code != TILE_FULL) apply_mask(pt, smem.item[s], code);
    // P^T = exp2(S^T * scale - lse)
    if constexpr (Config::HAS_SCORE_MOD) {
      weigh_modified(probabilities, products, pt, smem.lse_log2[s], alibi_of(smem.item[s], slope));
    } else {
      steps.exponentiate(pt, StageStatistics(smem.lse_log2[s], fresh_thread() % 4 * 8));
      Steps::to_fragments(probabilities, pt);
    }
    if constexpr (Config::SCORES_AT_A_TIME == 1) issue_gradients();
    // dV += P^T @ dO                                      [64, HEAD_DIM_V]
    Steps::issue_sum(dv, probabilities, dout);
    wgmma_wait<1>();
    hold(dst.x[0]);
    // dS^T = P^T * (dP^T - delta)
    const StageStatistics delta(smem.delta[s], fresh_thread() % 4 * 8);
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 x = delta[n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float minus = i % 2 == 0 ? x.x : x.y;
        dst.x[0][n][i] = weight(pt, products, n, i) * minus_delta<T>(dst.x[0][n][i], minus);
      }
    }
    // dK += dS^T @ Q                                      [64, HEAD_DIM]
    Steps::to_fragments(gradients, dst);
    steps.store_gradients(gradients, smem.item[s]);
    Steps::issue_sum(dk, gradients, q);
    wgmma_wait<0>();
    hold(dk.x[0]);
    hold(dv.x[0]);
    hold(probabilities);
    hold(gradients);
  }

  // lse or delta of a stage's queries, for a thread's scores, read from shared memory on each use.
  // `offset` is that of the first.
  struct StageStatistics {
    uint32_t at;
    __device__ __forceinline__ StageStatistics(const float* from, uint32_t offset)
        : at(shared_address(from) + offset) {}
    __device__ __forceinline__ float2 operator[](int n) const { return load_shared_8(at + n * 32); }
  };
  // Reads them at once.
  __device__ __forceinline__ static void load_statistics(Statistics& x,
                                                         const StageStatistics& from) {
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) x[n] = from[n];
  }

  // Replaces scores by 2^SHIFT P^T.
  template <int SHIFT = 0, class Lse>
  __device__ __forceinline__ void exponentiate(Scores& pt, const Lse& lse) const {
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const auto minus = [](float x) { return SHIFT == 0 ? -x : SHIFT - x; };
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 x = lse[n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pt.x[0][n][i] = exp2_approx(fmaf(pt.x[0][n][i], scale_log2, minus(i % 2 == 0 ? x.x : x.y)));
      }
    }
  }

  // ALiBi's slope of an item's head, read from global memory: call it before the scores are needed.
  __device__ __forceinline__ float slope_of(const DkdvItem& item) const {
    if constexpr (!Config::HAS_SCORE_MOD) return 0.0f;
    return minus_alibi_slope(p.scores, work.batch, work.head + item.member);
  }
  // Its part of this warp's scores.
  __device__ __forceinline__ AlibiBias<true> alibi_of(const DkdvItem& item, float slope) const {
    return {slope, item.row0 + work.seqlen_k - work.seqlen_q,
            work.key0 + group_row0() + warp_of_consumer() * 16};
  }

  // Of modified scores that begin_softcap() has seen.
  __device__ __forceinline__ void weigh_modified(Fragments& probabilities, Fragments& products,
                                                 const Scores& pt, const float* lse_log2,
                                                 const AlibiBias<true>& alibi) const {
    weigh<SCORE_MOD_SHIFT>(pt, shared_address(lse_log2), params.score_mod, alibi,
                           [&](int k, const auto& weight, const auto& product) {
                             to_a_operand<Target, T>(probabilities[k], weight, 0);
                             to_a_operand<Target, T>(products[k], product, 0);
                           });
  }
  // By what score (n, i) of dP^T - delta is multiplied for dS^T.
  __device__ __forceinline__ static float weight(const Scores& pt, const Fragments& products, int n,
                                                 int i) {
    if constexpr (Config::HAS_SCORE_MOD) {
      const float2 two = unpack<T>(products[n / 2][0][n % 2 * 2 + i / 2]);
      return (i % 2 == 0 ? two.x : two.y) * (1.0f / (1 << SCORE_MOD_SHIFT));
    } else {
      return pt.x[0][n][i];
    }
  }

  // The warpgroup's rows of K or V by the rows of Q or dO.
  template <int COLUMNS>
  __device__ __forceinline__ static void issue_scores(Scores& c, uint32_t keys, uint32_t queries) {
    const uint64_t a = KTile::by_rows(keys);
    const uint64_t b = QTile::by_rows(queries);
    wgmma_fence();
    wgmma<T, false, false, true>(c.x[0], a, b);
#pragma unroll
    for (int k = 1; k < COLUMNS / 16; ++k) {
      wgmma<T, false, false>(c.x[0], a + KTile::rows_step(k), b + QTile::rows_step(k));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ static void to_fragments(Fragments& a, const Scores& c) {
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) to_a_operand<Target, T>(a[k], c, k);
  }

  // Fragments by the columns of Q or dO.
  template <int NT>
  __device__ __forceinline__ static void issue_sum(Accumulator<1, NT>& sum, Fragments& a,
                                                   uint32_t queries) {
    const uint64_t b = QTile::by_columns(queries);
    hold(a);
    hold(sum.x[0]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k)
      wgmma<T, true>(sum.x[0], a[k][0], b + QTile::columns_step(k));
    wgmma_commit();
  }

  // Sets the scores that the mask hides to what has no weight. A lane asks for two queries' bits,
  // those of the warp's 16 keys, and has them from there handed to those whose scores they are.
  __device__ __forceinline__ void apply_mask(Scores& pt, const DkdvItem& item, int code) const {
    const Mask mask = Cursor::mask_of(p, work, item.member);
    const int lane = fresh_thread() % 32;
    const int warp = warp_of_consumer();
    uint32_t bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 x = tile_bits(mask, item.row0 + half * 32 + lane, work.key0 + group_row0(), code);
      bits |= ((warp < 2 ? x.x : x.y) >> warp % 2 * 16 & 0xffff) << half * 16;
    }
#pragma unroll
    for (int n = 0; n < BLOCK_M / 16; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t visible =
            __shfl_sync(0xffffffffu, bits, n * 8 + lane % 4 * 2 + e) >> lane / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            if (!(visible >> (half * 16 + h * 8) & 1)) {
              float& score = pt.x[0][half * 4 + n][2 * h + e];
              if constexpr (Config::HAS_SCORE_MOD) {
                score = masked_score(params.score_mod);
              } else {
                score = -INFINITY;
              }
            }
      }
  }

  // Stores the warp's 16 keys of a tile of dS in the workspace.
  __device__ __forceinline__ void store_gradients(const Fragments& ds, const DkdvItem& item) const {
    const int slot = item.slot[consumer()];
    if (slot < 0) return;
    uint8_t* at = static_cast<uint8_t*>(p.ds) + static_cast<int64_t>(slot) * DS_TILE_BYTES +
                  warp_of_consumer() * (BLOCK_M / 16) * DS_BLOCK_BYTES + fresh_thread() % 32 * 16;
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      store_global_16(at + k * DS_BLOCK_BYTES,
                      {ds[k][0][0], ds[k][0][1], ds[k][0][2], ds[k][0][3]});
    }
  }

  // This warpgroup's keys that exist, counted from the first.
  __device__ __forceinline__ RowSpan keys_here() const {
    const int key0 = work.key0 + group_row0();
    return {work.keys.first - key0, work.keys.end - key0};
  }
  __device__ __forceinline__ bool lacks_keys() const {
    const RowSpan here = keys_here();
    return here.first > 0 || here.end < KEYS;
  }
  // Whether some of the queries from row0 on belong to the next sequence.
  __device__ __forceinline__ bool lacks_queries(int row0) const {
    if (p.packing.cu_seqlens_q == nullptr) return false;  // the map ends there
    return work.seqlen_q - row0 < BLOCK_M;
  }
  __device__ __forceinline__ static void publish_zeros() {
    fence_proxy_async();
    barrier_sync(ONE_CONSUMER + consumer(), WARPGROUP);
  }

  // Writes zeros to this warpgroup's keys that do not exist.
  __device__ __forceinline__ void clear_keys() const {
    if (!lacks_keys()) return;
    const int thread = fresh_thread() % WARPGROUP;
    clear_rows<KTile, KEYS, PANELS, WARPGROUP>(own_k(), keys_here(), thread);
    clear_rows<KTile, KEYS, V_PANELS, WARPGROUP>(own_v(), keys_here(), thread);
    publish_zeros();
  }

  // Writes zeros to the queries of the next sequence. Each warpgroup does so, as the other may skip
  // this stage.
  __device__ __forceinline__ void clear_queries(int s, int row0) const {
    if (!lacks_queries(row0)) return;
    const RowSpan here{0, work.seqlen_q - row0};
    const int thread = fresh_thread() % WARPGROUP;
    clear_rows<QTile, BLOCK_M, PANELS, WARPGROUP>(shared_address(smem.stage[s].q), here, thread);
    clear_rows<QTile, BLOCK_M, V_PANELS, WARPGROUP>(shared_address(smem.stage[s].dout), here,
                                                    thread);
    publish_zeros();
  }

  // Writes dK and dV: rounded, through the warpgroup's rows of K and V, or as partial sums.
  __device__ __forceinline__ void store(DkSum& dk, DvSum& dv) const {
    store_sum(dk, gradient_scale<T>(p.softmax_scale), own_k(), p.dk, p.head_dim, p.dk_partial);
    store_sum(dv, 1.0f, own_v(), p.dv, p.head_dim_v, p.dv_partial);
  }

  // Writes the warpgroup's rows of dK or dV, through as many rows of a tile.
  template <int NT>
  __device__ __forceinline__ void store_sum(Accumulator<1, NT>& sum, float scale, uint32_t tile,
                                            const View& view, int columns, float* partial) const {
    if (keeps_sums(p)) {
      each_partial(sum, partial, [](float& x, float& y, float2& at) { at = {x, y}; });
      return;
    }
    const DkdvBlock& block = work.block;
    const int row0 = block.key0 + group_row0();
    const int64_t row = work.sequence.k0 + row0;
    sum.scale(scale);
    store_rows<KTile, Target, T>(sum, tile,
                                 head_begin(view, block.batch, block.head_kv, 0) + row * view.row,
                                 view.row, work.seqlen_k - row0, columns);
  }

  // f(x, y, place) for each two columns of this lane's part of dK or dV, of keys that exist, and
  // where they lie as fp32 sums.
  template <int NT, class F>
  __device__ __forceinline__ void each_partial(Accumulator<1, NT>& sum, float* sums, F f) const {
    const int row0 = work.block.key0 + group_row0();
    const int lane = fresh_thread() % 32;
    float* at = sums + (first_sum_row(p, work.block) + row0) * (NT * 8);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_of_consumer() * 16 + h * 8 + lane / 4;
      if (row >= work.seqlen_k - row0) continue;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        f(sum.x[0][n][2 * h], sum.x[0][n][2 * h + 1],
          *reinterpret_cast<float2*>(at + row * (NT * 8) + n * 8 + lane % 4 * 2));
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void dkdv_of_block(const typename Config::Params& params) {
  const BwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DkdvBlock block(p, Config::BLOCK_N);
  const Sequence sequence(p, block.batch);
  if (block.key0 >= sequence.seqlen_k) return;

  if (threadIdx.x == 0) {
    prefetch_map(params.q);
    prefetch_map(params.k);
    prefetch_map(params.v);
    prefetch_map(params.dout);
    mbarrier_init(shared_address(&smem.keys_full), 1);
    smem.barriers.make(Config::CONSUMERS * 4);
    mbarriers_made();
    find_dkdv_work<Config>(smem.work, p, block, sequence);
  }
  __syncthreads();

  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x == 0) DkdvSm90<Config>{params, smem}.load();
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    DkdvSm90<Config>{params, smem}.compute();
  }
}

}  // namespace flash_dist

// The steps that the kernels of dK and dV on Hopper share: dkdv.cuh, dkdv_pair.cuh,
// bwd_fused and bwd_halves.
#pragma once

#include "core/ds_scale.h"
#include "core/sequence.cuh"
#include "ptx/registers.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/bwd/config.h"
#include "sm90/bwd/launch.h"
#include "sm90/rows.cuh"
#include "sm90/steps.cuh"

namespace flash_dist {

template <class Config>
struct DkdvSm90Steps {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  using Cursor = DkdvCursor<Config>;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int PANELS = Config::PANELS;
  static constexpr int V_PANELS = Config::V_PANELS;
  static constexpr int KEYS = 64;  // keys of a warpgroup
  using DkSum = Accumulator<1, HEAD_DIM / 8>;
  using DvSum = Accumulator<1, HEAD_DIM_V / 8>;
  using Scores = Accumulator<1, BLOCK_M / 8>;
  using Fragments = uint32_t[BLOCK_M / 16][1][4];
  using Statistics = float2[BLOCK_M / 8];
  // In fp16, with soft cap or ALiBi, P^T is multiplied by 2^8, and dV is scaled back: below 2^-14,
  // the values from which dS^T is computed would lose bits.
  static constexpr int SCORE_MOD_SHIFT =
      Config::HAS_SCORE_MOD && std::is_same_v<T, Fp16> ? 8 : 0;  // log2 of the factor

  const typename Config::Params& params;
  Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;

  // Returns the first of this warpgroup's keys in the block.
  __device__ __forceinline__ static int group_row0() { return consumer() * KEYS; }
  // own_k, own_v: addresses of this warpgroup's rows of K and of V.
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

  // place_of_keys: coordinates of the block's keys in K or V. place_of_queries: those of a stage's
  // queries in Q or dO.
  __device__ __forceinline__ BoxPlace place_of_keys(const AxisSteps& axes) const {
    const DkdvBlock& block = work.block;
    return {0, work.sequence.k0 + block.key0, 0, block.head_kv * axes.head_kv,
            block.batch * axes.batch};
  }
  __device__ __forceinline__ BoxPlace place_of_queries(const AxisSteps& axes, int row0,
                                                       int head_in_group) const {
    const DkdvBlock& block = work.block;
    return {0, work.sequence.q0 + row0, head_in_group * axes.member, block.head_kv * axes.head_kv,
            block.batch * axes.batch};
  }

  // Loads K and V of the block's keys for the block's lifetime.
  __device__ __forceinline__ void load_keys() const {
    const uint32_t full = shared_address(&smem.keys_full);
    mbarrier_expect(full, (PANELS + V_PANELS) * KTile::BYTES);
    load_panels<PANELS, KTile::BYTES>(shared_address(smem.k), params.k,
                                      place_of_keys(params.k_axes), full);
    load_panels<V_PANELS, KTile::BYTES>(shared_address(smem.v), params.v,
                                        place_of_keys(params.v_axes), full);
  }

  // Describes the item at the cursor.
  __device__ __forceinline__ void describe(DkdvItem& item, const Cursor& cursor) const {
    item.row0 = cursor.row0();
    item.head_in_group = cursor.head_in_group;
    item.slot[0] = cursor.slot(p, work, 0);
    item.slot[1] = cursor.slot(p, work, 1);
    const int4* known = cursor.known(p, work);
    if (known != nullptr) item.known = *known;
  }

  // Loads Q, dO, lse and delta of the item at the cursor. Without ARRIVES, the caller arrives at
  // the stage's barrier.
  template <bool ARRIVES = true>
  __device__ __forceinline__ void load_queries(const Cursor& cursor, int s) const {
    const int row0 = cursor.row0();
    const int head_in_group = cursor.head_in_group;

    constexpr int STATISTICS = BLOCK_M * sizeof(float);
    const uint32_t full = shared_address(&smem.barriers.full[s]);
    constexpr int BYTES = (PANELS + V_PANELS) * QTile::BYTES + 2 * STATISTICS;
    if constexpr (ARRIVES) {
      mbarrier_expect(full, BYTES);
    } else {
      mbarrier_expect_bytes(full, BYTES);
    }
    load_panels<PANELS, QTile::BYTES>(shared_address(smem.stage[s].q), params.q,
                                      place_of_queries(params.q_axes, row0, head_in_group), full);
    const int64_t statistics =
        work.statistics + static_cast<int64_t>(head_in_group) * p.rows_padded + row0;
    load_bytes(shared_address(smem.lse_log2[s]), p.lse_log2 + statistics, STATISTICS, full);
    load_panels<V_PANELS, QTile::BYTES>(shared_address(smem.stage[s].dout), params.dout,
                                        place_of_queries(params.dout_axes, row0, head_in_group),
                                        full);
    load_bytes(shared_address(smem.delta[s]), p.delta + statistics, STATISTICS, full);
  }

  // lse or delta of a stage's queries, for a thread's scores, read from shared memory on each use.
  // `offset`: bytes before the thread's first value.
  struct StageStatistics {
    uint32_t at;
    __device__ __forceinline__ StageStatistics(const float* from, uint32_t offset)
        : at(shared_address(from) + offset) {}
    __device__ __forceinline__ float2 operator[](int n) const { return load_shared_8(at + n * 32); }
  };
  // Reads all statistics of this thread at once.
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

  // Returns minus_alibi_slope() of an item's head; 0 in kernels without a score modification. Reads
  // global memory, so call it well before the result is needed.
  __device__ __forceinline__ float slope_of(const DkdvItem& item) const {
    if constexpr (!Config::HAS_SCORE_MOD) return 0.0f;
    return minus_alibi_slope(p.scores, work.batch, work.head + item.head_in_group);
  }
  // Returns the ALiBi bias of this warp's scores.
  __device__ __forceinline__ AlibiBias<true> alibi_of(const DkdvItem& item, float slope) const {
    return {slope, item.row0 + work.seqlen_k - work.seqlen_q,
            work.key0 + group_row0() + warp_of_consumer() * 16};
  }

  // Converts scores with soft cap or ALiBi, after begin_softcap(), to P^T and to `products`, from
  // which dS^T is computed.
  __device__ __forceinline__ void weigh_modified(Fragments& probabilities, Fragments& products,
                                                 const Scores& pt, const float* lse_log2,
                                                 const AlibiBias<true>& alibi) const {
    weigh<SCORE_MOD_SHIFT>(pt, shared_address(lse_log2), params.score_mod, alibi,
                           [&](int k, const auto& weight, const auto& product) {
                             to_a_operand<Target, T>(probabilities[k], weight, 0);
                             to_a_operand<Target, T>(products[k], product, 0);
                           });
  }
  // Issues the product of the warpgroup's rows of K or V with the transposed rows of Q or dO.
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
  // Sets dropped weights, which are negative, to 0.
  __device__ __forceinline__ static void drop_marked(Fragments& a) {
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[k][0][i] = relu<T>(a[k][0][i]);
  }

  // Replaces dP^T of queries 16 * k to 16 * k + 15 in x by dS^T = P^T (dP^T - delta). pt: 2^SHIFT
  // P^T, as an A operand.
  template <int SHIFT, class Delta>
  __device__ __forceinline__ static void weigh_gradients(Scores& x, int k, const uint4& pt,
                                                         const Delta& delta) {
    constexpr float BACK = 1.0f / (1 << SHIFT);
    constexpr float FACTOR = BACK * DS_SCALE<T>;
    const uint32_t pairs[4] = {pt.x, pt.y, pt.z, pt.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 d = delta[2 * k + half];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&dst)[4] = x.x[0][2 * k + half];
        const float2 two = unpack<T>(pairs[2 * half + h]);
        dst[2 * h] = two.x * fmaf(dst[2 * h], FACTOR, -BACK * d.x);
        dst[2 * h + 1] = two.y * fmaf(dst[2 * h + 1], FACTOR, -BACK * d.y);
      }
    }
  }

  // Issues the product of fragments with Q or dO, which is added to `sum`.
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

  // Sets masked scores to -inf. A lane reads the mask bits of two queries for the warp's 16 keys;
  // shuffles bring them to the lanes that have the scores.
  __device__ __forceinline__ void apply_mask(Scores& pt, const DkdvItem& item, int code) const {
    const Mask mask = Cursor::mask_of(p, work, item.head_in_group);
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
            if (!(visible >> (half * 16 + h * 8) & 1)) pt.x[0][half * 4 + n][2 * h + e] = -INFINITY;
      }
  }

  // Stores the warp's 16 keys of a tile of dS in the workspace, if the tile has a slot.
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

  // Returns the range of this warpgroup's keys that exist, counted from its first key.
  __device__ __forceinline__ RowSpan keys_here() const {
    const int key0 = work.key0 + group_row0();
    return {work.keys.first - key0, work.keys.end - key0};
  }
  __device__ __forceinline__ bool lacks_keys() const {
    const RowSpan here = keys_here();
    return here.first > 0 || here.end < KEYS;
  }
  // Returns whether some of the BLOCK_M rows from row0 on belong to the next sequence.
  __device__ __forceinline__ bool lacks_queries(int row0) const {
    if (p.packing.cu_seqlens_q == nullptr) return false;  // no sequence follows in the tensor map
    return work.seqlen_q - row0 < BLOCK_M;
  }
  __device__ __forceinline__ static void publish_zeros() {
    fence_proxy_async();
    barrier_sync(ONE_CONSUMER + consumer(), WARPGROUP);
  }

  // Zeroes this warpgroup's rows of K and V whose keys do not exist.
  __device__ __forceinline__ void clear_keys() const {
    if (!lacks_keys()) return;
    const int thread = fresh_thread() % WARPGROUP;
    clear_rows<KTile, KEYS, PANELS, WARPGROUP>(own_k(), keys_here(), thread);
    clear_rows<KTile, KEYS, V_PANELS, WARPGROUP>(own_v(), keys_here(), thread);
    publish_zeros();
  }

  // Zeroes a stage's rows of Q and dO that belong to the next sequence. Each warpgroup does so,
  // because the other warpgroup may skip this stage.
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

  // Writes the warpgroup's rows of dK or dV, as partial sums or rounded. Rounded rows pass through
  // the same rows of `tile` in shared memory.
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

  // Calls f(x, y, partial) for each pair of adjacent columns of dK or dV that this lane holds, in
  // rows of existing keys. partial: the same two columns of `sums`, fp32 in global memory. `sums`
  // has `width` columns; those of `sum` begin at column0.
  template <int NT, class F>
  __device__ __forceinline__ void each_partial(Accumulator<1, NT>& sum, float* sums, F f,
                                               int width = NT * 8, int column0 = 0) const {
    const int row0 = work.block.key0 + group_row0();
    const int lane = fresh_thread() % 32;
    float* at = sums + (first_sum_row(p, work.block) + row0) * width + column0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_of_consumer() * 16 + h * 8 + lane / 4;
      if (row >= work.seqlen_k - row0) continue;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        f(sum.x[0][n][2 * h], sum.x[0][n][2 * h + 1],
          *reinterpret_cast<float2*>(at + row * width + n * 8 + lane % 4 * 2));
      }
    }
  }
};

}  // namespace flash_dist

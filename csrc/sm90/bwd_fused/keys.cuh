// A warpgroup of 64 keys of the fused backward: computes their dK and dV, and stores dS^T for dQ.
#pragma once

#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/bwd/dkdv_steps.cuh"
#include "sm90/bwd_fused/bias.cuh"
#include "sm90/bwd_fused/dq.cuh"
#include "sm90/dropout.cuh"

namespace flash_dist {

template <class Config>
struct FusedSm90Keys {
  using Steps = DkdvSm90Steps<Config>;
  using DkSum = typename Steps::DkSum;
  using DvSum = typename Steps::DvSum;
  using Fragments = typename Steps::Fragments;
  using KTile = typename Config::KTile;
  using Scores = typename Steps::Scores;
  using Smem = typename Config::Smem;
  using Stages = Ring<Config::STAGES>;
  using StageStatistics = typename Steps::StageStatistics;
  using T = typename Config::T;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  static constexpr int KEYS = Steps::KEYS;
  using DsTile = typename Config::DsTile;
  using Gradients = typename Config::Gradients;
  using Keys = uint32_t[Config::KEYS_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];  // A operands

  using BiasTile = typename Config::BiasTile;
  static constexpr bool BIAS_IN_TILES = Config::BIAS_IN_BOXES;

  // In fp16, if dS^T is computed from rounded values (P^T, or `products` with soft cap or ALiBi),
  // these are multiplied by 2^8: below 2^-14 they would lose bits, and so would dS. dV and dS are
  // scaled back.
  static constexpr int SHIFT =
      (Config::SCORES_AT_A_TIME == 1 || Config::HAS_SCORE_MOD) && std::is_same_v<T, Fp16>
          ? 8
          : 0;  // log2 of the factor
  static constexpr float BACK = 1.0f / (1 << SHIFT);

  // This thread's lse or delta of a stage, read while products run, if there are registers for it.
  struct EarlyStatistics {
    typename Steps::Statistics x;
    __device__ __forceinline__ explicit EarlyStatistics(const StageStatistics& from) {
      Steps::load_statistics(x, from);
    }
    __device__ __forceinline__ float2 operator[](int n) const { return x[n]; }
  };
  using ReadStatistics =
      std::conditional_t<Config::KEYS_IN_REGISTERS, EarlyStatistics, StageStatistics>;

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;
  const Steps steps{params, smem};
  const FusedSm90Dq<Config> dq{params, smem};

  // Computes dK and dV, in a warpgroup of 64 keys.
  __device__ __forceinline__ void compute() const {
    DkSum dk;
    DvSum dv;
    dk.clear();
    dv.clear();
    mainloop(dk, dv);
    if (SHIFT != 0) dv.scale(BACK);
    if constexpr (Config::DROPS) dv.scale(params.dropout.scale);
    steps.store(dk, dv);
  }

 private:
  // Waits for the bias.
  __device__ __forceinline__ void wait_for_bias(const Gradients& place) const {
    if constexpr (BIAS_IN_TILES) {
      mbarrier_wait(shared_address(&smem.bias_full[place.stage()]), place.parity());
    }
  }
  // Zeroes the rows of a bias tile whose queries belong to the next sequence.
  __device__ __forceinline__ void clear_bias(uint32_t tile, int row0) const {
    if (!steps.lacks_queries(row0)) return;
#pragma unroll
    for (int panel = 0; panel < Config::BIAS_PANELS; ++panel) {
      clear_rows<BiasTile, BLOCK_M, 1, WARPGROUP>(
          tile + panel * Config::DS_BYTES, {0, work.seqlen_q - row0}, fresh_thread() % WARPGROUP);
    }
    Steps::publish_zeros();
  }

  // Constants of a thread of the key warpgroups, computed before the loop unless KEYS_MULTIPLY.
  // NOTE: `half` comes from a shuffle, which tells the compiler that all lanes have the same value.
  // The compiler then keeps derived values in uniform registers, and puts no loads of matrix
  // descriptors between the products.
  struct Thread {
    int half;            // 0 or 1: which half of the block's keys this warpgroup has
    bool elected;        // this thread arrives for its warp
    uint32_t statistic;  // offset of this thread's first lse and delta in a stage
    uint32_t gradient;   // offset of the row that this lane addresses for stmatrix of dS^T
    Keys k, v;           // rows of K and V, if these stay in registers

    __device__ __forceinline__ explicit Thread(const Smem& smem)
        : half(__shfl_sync(0xffffffffu, consumer(), 0)),
          elected(fresh_thread() % 32 == 0),
          statistic(fresh_thread() % 4 * 8) {
      const int lane = fresh_thread() % 32;
      const int row = half * KEYS + warp_of_consumer() * 16 + lane % 16;
      gradient = DsTile::offset(row, lane / 16);
      if constexpr (Config::KEYS_IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; ++i) {
          const uint32_t offset = KTile::offset(row, 2 * i + lane / 16);
          ldmatrix_x4(k[i], shared_address(smem.k) + offset);
          ldmatrix_x4(v[i], shared_address(smem.v) + offset);
        }
      }
    }
    // Returns the address of the warpgroup's rows of K or V.
    __device__ __forceinline__ uint32_t rows_of(const uint8_t* tile) const {
      return shared_address(tile) + half * KEYS * KTile::ROW_BYTES;
    }
  };

  struct DropoutThread : Thread {
    KeyDropout dropout;

    __device__ __forceinline__ DropoutThread(const Smem& smem, const DropoutParams& p, int key0)
        : Thread(smem), dropout(p, key0) {}
  };
  using OwnThread = std::conditional_t<Config::DROPS, DropoutThread, Thread>;

  __device__ __forceinline__ OwnThread make_thread() const {
    if constexpr (Config::DROPS) {
      const int key0 = work.key0 + Steps::group_row0() + warp_of_consumer() * 16;
      return OwnThread(smem, params.dropout, key0);
    } else {
      return OwnThread(smem);
    }
  }

  __device__ __forceinline__ void mainloop(DkSum& dk, DvSum& dv) const {
    if (work.items == 0) return;
    mbarrier_wait(shared_address(&smem.keys_full), 0);
    steps.clear_keys();
    if constexpr (!Config::KEYS_MULTIPLY) barrier_arrive(KEYS_CLEARED, Config::KEY_READERS);
    const OwnThread thread = make_thread();
    Stages stages;
    stagger(thread, 1);
    if constexpr (!Config::KEYS_MULTIPLY) {
#pragma unroll 1
      for (int left = work.items; left > 0; --left, stages.advance()) {
        step(dk, dv, thread, stages);
        release(thread, stages);
      }
    } else {
      // NOTE: a thread's constants are computed again in each step. Otherwise values derived from
      // them would occupy registers.
#pragma unroll 1
      for (; static_cast<int>(stages.passed) < work.items; stages.advance()) {
        step(dk, dv, make_thread(), stages);
      }
      dq.hand_over();
    }
    barrier_sync(KEYS_READ, Config::KEY_READERS);
  }

  // Reports that this warp has read a stage of queries.
  __device__ __forceinline__ void release(const Thread& thread, const Stages& stages) const {
    __syncwarp();
    if (thread.elected) mbarrier_arrive(shared_address(&smem.barriers.empty[stages.stage()]));
  }

  // Adds the products of a stage to dK and dV. If its scores are all masked, stores only dS^T = 0.
  __device__ __forceinline__ void step(DkSum& dk, DvSum& dv, const OwnThread& thread,
                                       const Stages& stages) const {
    smem.barriers.wait_for_data(stages);
    const FusedItem& item = smem.item[stages.stage()];
    const int code = item.code[thread.half];
    if (code != TILE_EMPTY) {
      steps.clear_queries(stages.stage(), item.row0);
      add(dk, dv, thread, stages, item, code);
    } else {
      const Gradients place{stages.passed};
      if (stages.passed == 0) stagger(thread, 0);
      if (Config::KEYS_MULTIPLY && stages.passed > 0) dq.hand_over();
      smem.wait_for_place(place);
      wait_for_bias(place);
      store_zeros(thread, place);  // the other half of the keys may be visible
      arrive_ds(thread, place);
      if constexpr (Config::KEYS_MULTIPLY) {
        dq.sum_half(thread.half, place, [&] { release(thread, stages); });
      }
    }
  }
  // Delays the second warpgroup of keys until the first one has computed its first exponentials, if
  // there are registers for only one of S^T and dP^T at a time. From then on, one warpgroup
  // multiplies while the other computes exponentials.
  __device__ __forceinline__ static void stagger(const Thread& thread, int half) {
    if (Config::SCORES_AT_A_TIME == 2 || thread.half != half) return;
    constexpr int THREADS = Config::CONSUMERS * WARPGROUP;
    if (half == 0) {
      barrier_arrive(APART, THREADS);
    } else {
      barrier_sync(APART, THREADS);
    }
  }

  // Adds the products of a stage to dK and dV, and stores dS^T for dQ.
  __device__ __forceinline__ void add(DkSum& dk, DvSum& dv, const OwnThread& thread,
                                      const Stages& stages, const FusedItem& item, int code) const {
    const int s = stages.stage();
    const Gradients place{stages.passed};
    const uint32_t q = uniform(shared_address(smem.stage[s].q));
    const uint32_t dout = uniform(shared_address(smem.stage[s].dout));
    Scores pt, dst;
    Fragments probabilities, gradients;
    Fragments products;  // with soft cap or ALiBi: dS^T is computed from these
    const StageStatistics lse{smem.lse_log2[s], thread.statistic},
        delta{smem.delta[s], thread.statistic};
    const float slope = steps.slope_of(item);
    [[maybe_unused]] typename BwdSm90BiasElements<Config>::Fragment bias;
    const auto find_weights = [&](const auto& lse) {
      if constexpr (Config::HAS_SCORE_MOD) begin_softcap(pt, params.score_mod);
      if (code != TILE_FULL) steps.apply_mask(pt, item, code);
      if constexpr (Config::HAS_SCORE_MOD) {
        steps.weigh_modified(probabilities, products, pt, smem.lse_log2[s],
                             steps.alibi_of(item, slope));
      } else {
        if constexpr (BIAS_IN_TILES) {
          wait_for_bias(place);
          const uint32_t tile = smem.bias_tile(thread.half, place);
          clear_bias(tile, item.row0);
          BwdSm90BiasTile<Config>{params, tile}.template exponentiate<SHIFT>(pt, lse);
        } else if constexpr (Config::HAS_BIAS) {
          BwdSm90BiasElements<Config>{p, work}.template exponentiate<SHIFT>(pt, lse, bias);
        } else {
          steps.template exponentiate<SHIFT>(pt, lse);
        }
        if constexpr (Config::DROPS) {
          thread.dropout.mark(pt, sequence_head(p, work.batch, work.head + item.head_in_group),
                              item.row0);
        }
        Steps::to_fragments(probabilities, pt);
        if constexpr (Config::DROPS && Config::SCORES_AT_A_TIME == 2) {
          Steps::drop_marked(probabilities);
        }
      }
    };
    // S^T = K @ Q.T                                       [64, BLOCK_M]
    issue_scores<HEAD_DIM>(pt, thread.k, thread.rows_of(smem.k), q);
    if constexpr (Config::BIAS == BiasLoads::ELEMENTS) {
      const int key0 = work.key0 + Steps::group_row0() + warp_of_consumer() * 16;
      BwdSm90BiasElements<Config>{p, work}.fetch(bias, item, key0);
    }
    if (Config::KEYS_MULTIPLY && stages.passed > 0) dq.hand_over();
    if constexpr (Config::SCORES_AT_A_TIME == 2) {
      // dP^T = V @ dO.T                                   [64, BLOCK_M]
      issue_scores<HEAD_DIM_V>(dst, thread.v, thread.rows_of(smem.v), dout);
      const ReadStatistics own_lse(lse);
      wgmma_wait<1>();
      hold(pt.x[0]);
      // P^T = exp2(S^T * scale - lse)
      find_weights(own_lse);
      // dV += P^T @ dO                                    [64, HEAD_DIM_V]
      Steps::issue_sum(dv, probabilities, dout);
      const ReadStatistics own_delta(delta);
      wgmma_wait<1>();
      hold(dst.x[0]);
      // dS^T = P^T * (dP^T - delta)
      if constexpr (Config::HAS_SCORE_MOD) {
        differentiate(dst, products, delta);
      } else {
        differentiate(dst, pt, own_delta);
      }
    } else {
      wgmma_wait<0>();
      hold(pt.x[0]);
      // P^T = exp2(S^T * scale - lse)
      find_weights(lse);
      if (stages.passed == 0) stagger(thread, 0);
      // dP^T = V @ dO.T                                   [64, BLOCK_M]
      issue_scores<HEAD_DIM_V>(dst, thread.v, thread.rows_of(smem.v), dout);
      // dV += P^T @ dO                                    [64, HEAD_DIM_V]
      if constexpr (Config::KEYS_MULTIPLY) Steps::issue_sum(dv, probabilities, dout);
      wgmma_wait<Config::KEYS_MULTIPLY ? 1 : 0>();
      hold(dst.x[0]);
      // dS^T = P^T * (dP^T - delta), with rounded P^T
      if constexpr (Config::HAS_SCORE_MOD) {
        differentiate(dst, products, delta);
      } else {
        differentiate(dst, probabilities, delta);
      }
      hold(dst.x[0]);
      if constexpr (Config::DROPS) Steps::drop_marked(probabilities);
      if constexpr (!Config::KEYS_MULTIPLY) Steps::issue_sum(dv, probabilities, dout);
    }
    // dK += dS^T @ Q                                      [64, HEAD_DIM]
    Steps::to_fragments(gradients, dst);
    if constexpr (BIAS_IN_TILES) {
      barrier_sync(ONE_CONSUMER + thread.half, WARPGROUP);  // all warps have read the bias
    } else {
      smem.wait_for_place(place);
    }
    store_ds(gradients, thread, place);
    Steps::issue_sum(dk, gradients, q);
    arrive_ds(thread, place);
    await_sums(dk, dv, probabilities, gradients, thread, stages, place);
  }

  // Waits until the products of a stage have been added to dK and dV. With KEYS_MULTIPLY, computes
  // this warpgroup's half of the columns of dQ meanwhile.
  __device__ __forceinline__ void await_sums(DkSum& dk, DvSum& dv, Fragments& probabilities,
                                             Fragments& gradients, const OwnThread& thread,
                                             const Stages& stages, const Gradients& place) const {
    if constexpr (!Config::KEYS_MULTIPLY) {
      wgmma_wait<0>();
      hold(dk.x[0]);
      hold(dv.x[0]);
      hold(probabilities);
      hold(gradients);
    } else {
      wgmma_wait<1>();
      hold(dv.x[0]);
      hold(probabilities);
      // dQ = dS @ K                                       [BLOCK_M, HEAD_DIM / 2]
      dq.sum_half(thread.half, place, [&] {
        hold(dk.x[0]);
        hold(gradients);
        release(thread, stages);
      });
    }
  }

  // Issues the product of the warpgroup's rows of K or V, in registers or at `rows`, with Q or dO.
  template <int COLUMNS>
  __device__ __forceinline__ static void issue_scores(Scores& c, const Keys& a, uint32_t rows,
                                                      uint32_t queries) {
    if constexpr (!Config::KEYS_IN_REGISTERS) {
      Steps::template issue_scores<COLUMNS>(c, rows, queries);
    } else {
      const uint64_t b = Config::QTile::by_rows(queries);
      wgmma_fence();
      wgmma<T, false, true>(c.x[0], a[0], b);
#pragma unroll
      for (int k = 1; k < COLUMNS / 16; ++k) {
        wgmma<T, false>(c.x[0], a[k], b + Config::QTile::rows_step(k));
      }
      wgmma_commit();
    }
  }

  // Returns P (dP - delta). weight: TIMES * P, negative if it is dropped: dP then counts as 0.
  template <int TIMES>
  __device__ __forceinline__ float differentiate_marked(float weight, float dp, float delta) const {
    constexpr float BACK_FROM = 1.0f / TIMES;
    const float scaled = dp * (BACK_FROM * DS_SCALE<T> * params.dropout.scale);
    return fmaf(fmaxf(weight, 0.0f), scaled, -fabsf(weight) * (BACK_FROM * delta));
  }

  // Replaces dP^T by P^T (dP^T - delta).
  template <class Delta>
  __device__ __forceinline__ void differentiate(Scores& dst, const Scores& pt,
                                                const Delta& delta) const {
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 x = delta[n];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (Config::DROPS) {
          dst.x[0][n][i] =
              differentiate_marked<1>(pt.x[0][n][i], dst.x[0][n][i], i % 2 == 0 ? x.x : x.y);
        } else {
          dst.x[0][n][i] = pt.x[0][n][i] * minus_delta<T>(dst.x[0][n][i], i % 2 == 0 ? x.x : x.y);
        }
      }
    }
  }

  // Replaces dP^T by P^T (dP^T - delta). pt: rounded 2^SHIFT P^T.
  __device__ __forceinline__ void differentiate(Scores& dst, const Fragments& pt,
                                                const StageStatistics& delta) const {
#pragma unroll
    for (int n = 0; n < BLOCK_M / 8; ++n) {
      const float2 x = delta[n];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float (&own)[4] = dst.x[0][n];
        const float2 two = unpack<T>(pt[n / 2][0][n % 2 * 2 + h]);
        if constexpr (Config::DROPS) {
          own[2 * h] = differentiate_marked<1 << SHIFT>(two.x, own[2 * h], x.x);
          own[2 * h + 1] = differentiate_marked<1 << SHIFT>(two.y, own[2 * h + 1], x.y);
        } else if constexpr (SHIFT == 0) {
          own[2 * h] = two.x * minus_delta<T>(own[2 * h], x.x);
          own[2 * h + 1] = two.y * minus_delta<T>(own[2 * h + 1], x.y);
        } else {
          constexpr float FACTOR = BACK * DS_SCALE<T>;
          own[2 * h] = two.x * fmaf(own[2 * h], FACTOR, -BACK * x.x);
          own[2 * h + 1] = two.y * fmaf(own[2 * h + 1], FACTOR, -BACK * x.y);
        }
      }
    }
  }

  // Stores the warp's 16 keys of dS^T in the stage.
  __device__ __forceinline__ void store_ds(const Fragments& ds, const Thread& thread,
                                           const Gradients& place) const {
    const uint32_t tile = shared_address(smem.ds[place.stage()]);
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k) {
      stmatrix_x4(tile + (thread.gradient ^ k * 32), ds[k][0]);  // 32 bytes, two chunks, per step
    }
  }

  // Stores zeros in the stage as dS^T of the warp's 16 keys, whose scores are all masked.
  __device__ __forceinline__ void store_zeros(const Thread& thread, const Gradients& place) const {
    Fragments zeros;
#pragma unroll
    for (int k = 0; k < BLOCK_M / 16; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) zeros[k][0][i] = 0;
    store_ds(zeros, thread, place);
  }

  // Reports that this warp has stored its dS^T.
  __device__ __forceinline__ void arrive_ds(const Thread& thread, const Gradients& place) const {
    fence_proxy_async();
    __syncwarp();
    if (thread.elected) mbarrier_arrive(shared_address(&smem.ds_full[place.stage()]));
  }
};

}  // namespace flash_dist

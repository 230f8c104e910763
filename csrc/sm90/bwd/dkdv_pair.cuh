// dK and dV by clusters of two blocks that share a key tile, for head_dims whose two sums do not
// fit in the registers of one block. Each block computes two of the four products:
//
//   block 0   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   block 1   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q
//
// Exchange  Each thread of block 0 sends its rounded P^T to the same thread of block 1, through one
//           of SLOTS places in the shared memory of block 1. In fp16 it sends 2^8 P^T: below 2^-14
//           P would lose bits, and so would dS. dV and dS are scaled back.
// Shared    K or V (for the block's lifetime), STAGES stages of Q and dO, and of lse or delta.
//           Block 0 reads Q, and block 1 reads dO, long before the other tile of the stage. So each
//           tile has its own barriers.
// Pipeline  As in dkdv.cuh. The first product of a stage runs together with the second product of
//           the previous stage. During the latter, P^T of the stage is computed and sent, or dS^T
//           is computed and stored: the product that still runs reads other fragments.
#pragma once

#include "ptx/cluster.cuh"
#include "sm90/bwd/dkdv_steps.cuh"

namespace flash_dist {

enum class PairRole { SCORES, GRADIENTS };  // the roles of block 0 and of block 1 of a cluster

template <class Config, PairRole ROLE>
struct DkdvOfPair {
  using Steps = DkdvSm90Steps<Config>;
  using Cursor = DkdvCursor<Config>;
  using Fragments = typename Steps::Fragments;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;
  using Scores = typename Steps::Scores;
  using Stages = Ring<Config::STAGES>;
  using StageStatistics = typename Steps::StageStatistics;
  using Statistics = typename Steps::Statistics;
  static constexpr int BLOCK_M = Config::BLOCK_M;
  static constexpr int KEYS = Steps::KEYS;
  using Slots = Ring<Config::SLOTS>;
  static constexpr bool IS_SCORES = ROLE == PairRole::SCORES;
  static constexpr int PEER = IS_SCORES ? 1 : 0;
  static constexpr int PIECES = BLOCK_M / 16;  // pieces of 512 bytes that a warp sends
  // COLUMNS: columns of the first product's operands (K and Q, or V and dO). SUM_COLUMNS: columns
  // of the sum (dV or dK).
  static constexpr int COLUMNS = IS_SCORES ? Config::HEAD_DIM : Config::HEAD_DIM_V;
  static constexpr int SUM_COLUMNS = IS_SCORES ? Config::HEAD_DIM_V : Config::HEAD_DIM;
  static constexpr int PANELS = KTile::count(COLUMNS);
  static constexpr int SUM_PANELS = KTile::count(SUM_COLUMNS);
  using Sum = Accumulator<1, SUM_COLUMNS / 8>;
  // log2 of the factor by which P^T is multiplied.
  static constexpr int SHIFT = std::is_same_v<typename Config::T, Fp16> ? 8 : 0;
  static constexpr float BACK = 1.0f / (1 << SHIFT);
  // True if P^T is sent, or dS^T stored, before the second product of the previous stage is
  // complete. With soft cap or ALiBi three fragments are in use already, so this is done after that
  // product.
  static constexpr bool SENDS_EARLY = !Config::HAS_SCORE_MOD;

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;
  const Steps steps{params, smem};

  // Loads K or V of the block's keys for the block's lifetime, in one thread.
  __device__ __forceinline__ void load_keys() const {
    const uint32_t full = shared_address(&smem.keys_full);
    mbarrier_expect(full, PANELS * KTile::BYTES);
    Steps::template load_panels<PANELS, KTile::BYTES>(
        shared_address(smem.keys), IS_SCORES ? params.k : params.v,
        steps.place_of_keys(IS_SCORES ? params.k_axes : params.v_axes), full);
  }

  // Loads the stages of queries, in the thread that loaded the keys.
  __device__ __forceinline__ void load() const {
    if (work.items == 0) return;
    Cursor cursor(p, work);
    Stages stages;
#pragma unroll 1
    for (int left = work.items; left > 0; --left, stages.advance()) {
      smem.first.wait_for_place(stages);
      steps.describe(item(stages), cursor);
      load_first(stages);
      if (stages.passed > 0) load_second(before(stages));
      cursor.next(p, work);
    }
    load_second(before(stages));
  }

  // Computes dV or dK, in a warpgroup of 64 keys.
  __device__ __forceinline__ void compute() const {
    Sum sum;
    sum.clear();
    if (!p.sums_first) {
      steps.each_partial(sum, IS_SCORES ? p.dv_partial : p.dk_partial,
                         [](float& x, float& y, float2& at) { x = at.x, y = at.y; });
    }
    mainloop(sum);
    if constexpr (IS_SCORES) {
      if (p.sums_last) sum.scale(BACK);  // between query chunks, sums keep the factor
      steps.store_sum(sum, 1.0f, own_keys(), p.dv, p.head_dim_v, p.dv_partial);
    } else {
      steps.store_sum(sum, gradient_scale<typename Config::T>(p.softmax_scale), own_keys(), p.dk,
                      p.head_dim, p.dk_partial);
    }
  }

 private:
  __device__ __forceinline__ static Stages before(const Stages& stages) {
    return {stages.passed - 1};
  }
  __device__ __forceinline__ static Stages after(const Stages& stages) {
    return {stages.passed + 1};
  }
  // NOTE: there are twice as many items as stages. The item of a stage is needed until the stage's
  // second tile has been read. Before that, the stage's first tile may be filled again for a later
  // item.
  __device__ __forceinline__ static int item_of(const Stages& stages) {
    return stages.passed % (2 * Config::STAGES);
  }
  __device__ __forceinline__ DkdvItem& item(const Stages& stages) const {
    return smem.item[item_of(stages)];
  }
  // Returns the address of this warpgroup's rows of K or V.
  __device__ __forceinline__ uint32_t own_keys() const {
    return shared_address(smem.keys) + steps.group_row0() * KTile::ROW_BYTES;
  }
  // first_tile, second_tile: addresses of a stage's Q and dO in block 0, of dO and Q in block 1.
  __device__ __forceinline__ uint32_t first_tile(const Stages& stages) const {
    auto& stage = smem.stage[stages.stage()];
    return shared_address(IS_SCORES ? stage.q : stage.dout);
  }
  __device__ __forceinline__ uint32_t second_tile(const Stages& stages) const {
    auto& stage = smem.stage[stages.stage()];
    return shared_address(IS_SCORES ? stage.dout : stage.q);
  }

  // Loads Q and lse, or dO and delta.
  __device__ __forceinline__ void load_first(const Stages& stages) const {
    constexpr int STATISTICS = BLOCK_M * sizeof(float);
    const int s = stages.stage();
    const int row0 = item(stages).row0;
    const int head_in_group = item(stages).head_in_group;
    const uint32_t full = shared_address(&smem.first.full[s]);
    mbarrier_expect(full, PANELS * QTile::BYTES + STATISTICS);
    Steps::template load_panels<PANELS, QTile::BYTES>(
        first_tile(stages), IS_SCORES ? params.q : params.dout,
        steps.place_of_queries(IS_SCORES ? params.q_axes : params.dout_axes, row0, head_in_group),
        full);
    const int64_t statistics =
        work.statistics + static_cast<int64_t>(head_in_group) * p.rows_padded + row0;
    load_bytes(shared_address(smem.statistics[s]), (IS_SCORES ? p.lse_log2 : p.delta) + statistics,
               STATISTICS, full);
  }

  // Loads dO, or Q, once its place in the stage is empty.
  __device__ __forceinline__ void load_second(const Stages& stages) const {
    const uint32_t full = shared_address(&smem.second.full[stages.stage()]);
    smem.second.wait_for_place(stages);
    mbarrier_expect(full, SUM_PANELS * QTile::BYTES);
    Steps::template load_panels<SUM_PANELS, QTile::BYTES>(
        second_tile(stages), IS_SCORES ? params.dout : params.q,
        steps.place_of_queries(IS_SCORES ? params.dout_axes : params.q_axes, item(stages).row0,
                               item(stages).head_in_group),
        full);
  }

  __device__ __forceinline__ void mainloop(Sum& sum) const {
    mbarrier_wait(shared_address(&smem.keys_full), 0);
    if (work.items == 0) return;
    clear_keys();
    Scores x;
    Fragments even, odd;  // of even and of odd stages; of all stages in `even` if !SENDS_EARLY
    Fragments products;   // with soft cap or ALiBi: the other block computes dS^T from these
    Stages stages;
    Slots slots;
    expect_all();
#pragma unroll 1
    while (static_cast<int>(stages.passed) < work.items) {
      int code = find(stages);
      if (code == TILE_EMPTY) {
        skip(stages);
        stages.advance();
        continue;
      }
      const float slope = steps.slope_of(item(stages));
      issue_first(x, stages);
      Statistics statistics;
      load_statistics(statistics, stages);
      wgmma_wait<0>();
      hold(x.x[0]);
      finish(x, statistics, products, slope, stages, slots, code);
      hand_on(even, products, x, stages, slots);
      stages.advance();
      code = find(stages);
      // A fully masked stage ends the pipeline. To skip such a stage, its second tile must have
      // arrived, too. That tile arrives only after the second tile of the previous stage has been
      // released.
#pragma unroll 1
      while (true) {
        if (code == TILE_EMPTY) {
          add(sum, even, before(stages));
          break;
        }
        if constexpr (SENDS_EARLY) {
          code = go_on(sum, x, even, odd, products, stages, slots, code);
          if (code == TILE_EMPTY) {
            add(sum, odd, before(stages));
            break;
          }
          code = go_on(sum, x, odd, even, products, stages, slots, code);
        } else {
          code = go_on(sum, x, even, even, products, stages, slots, code);
        }
      }
    }
    wait_for_peer(slots);
  }

  // Computes the first product of a stage, and the second product of the previous stage, whose
  // fragments are `of_before`. Advances `stages` and returns the mask's code of the next stage.
  __device__ __forceinline__ int go_on(Sum& sum, Scores& x, Fragments& of_before, Fragments& now,
                                       Fragments& products, Stages& stages, Slots& slots,
                                       int code) const {
    const Stages last = before(stages);
    const float slope = steps.slope_of(item(stages));
    issue_first(x, stages);
    issue_second(sum, of_before, last);
    Statistics statistics;
    load_statistics(statistics, stages);
    wgmma_wait<1>();
    hold(x.x[0]);
    finish(x, statistics, products, slope, stages, slots, code);
    if constexpr (SENDS_EARLY) hand_on(now, products, x, stages, slots);
    // NOTE: find() must stay here. It contains a branch, so that ptxas moves no code from above it
    // past the wait in end_second().
    code = find(after(stages));
    end_second(sum, of_before, last);
    if constexpr (!SENDS_EARLY) hand_on(now, products, x, stages, slots);
    stages.advance();
    return code;
  }
  __device__ __forceinline__ void add(Sum& sum, Fragments& fragments, const Stages& stages) const {
    issue_second(sum, fragments, stages);
    end_second(sum, fragments, stages);
  }

  // Waits for a stage. Returns the mask's code for this warpgroup; TILE_EMPTY after the last stage.
  __device__ __forceinline__ int find(const Stages& stages) const {
    if (static_cast<int>(stages.passed) >= work.items) return TILE_EMPTY;
    smem.first.wait_for_data(stages);
    return tile_code(p, work, item(stages), consumer());
  }
  __device__ __forceinline__ void skip(const Stages& stages) const {
    smem.first.release(stages.stage());
    smem.second.wait_for_data(stages);
    smem.second.release(stages.stage());
  }

  // S^T = K @ Q.T, or dP^T = V @ dO.T                     [64, BLOCK_M]
  __device__ __forceinline__ void issue_first(Scores& x, const Stages& stages) const {
    clear_queries<PANELS>(first_tile(stages), stages);
    Steps::template issue_scores<COLUMNS>(x, uniform(own_keys()), uniform(first_tile(stages)));
  }

  // dV += P^T @ dO, or dK += dS^T @ Q                     [64, SUM_COLUMNS]
  __device__ __forceinline__ void issue_second(Sum& sum, Fragments& fragments,
                                               const Stages& stages) const {
    smem.second.wait_for_data(stages);
    clear_queries<SUM_PANELS>(second_tile(stages), stages);
    Steps::issue_sum(sum, fragments, uniform(second_tile(stages)));
  }
  __device__ __forceinline__ void end_second(Sum& sum, Fragments& fragments,
                                             const Stages& stages) const {
    wgmma_wait<0>();
    hold(sum.x[0]);
    hold(fragments);
    smem.second.release(stages.stage());
  }

  // Zeroes this warpgroup's rows of K or V whose keys do not exist.
  __device__ __forceinline__ void clear_keys() const {
    if (!steps.lacks_keys()) return;
    clear_rows<KTile, KEYS, PANELS, WARPGROUP>(own_keys(), steps.keys_here(),
                                               fresh_thread() % WARPGROUP);
    Steps::publish_zeros();
  }
  // Zeroes the rows of Q or dO that belong to the next sequence.
  template <int COUNT>
  __device__ __forceinline__ void clear_queries(uint32_t tile, const Stages& stages) const {
    const int row0 = item(stages).row0;
    if (!steps.lacks_queries(row0)) return;
    clear_rows<QTile, BLOCK_M, COUNT, WARPGROUP>(tile, {0, work.seqlen_q - row0},
                                                 fresh_thread() % WARPGROUP);
    Steps::publish_zeros();
  }

  // Loads lse, or delta, of a stage's queries. With soft cap or ALiBi, weigh() reads lse itself.
  __device__ __forceinline__ void load_statistics(Statistics& x, const Stages& stages) const {
    if constexpr (IS_SCORES && Config::HAS_SCORE_MOD) return;
    Steps::load_statistics(
        x, StageStatistics(smem.statistics[stages.stage()], fresh_thread() % 4 * 8));
  }

  // Converts S^T to P^T (times 2^SHIFT), or dP^T to dS^T.
  __device__ __forceinline__ void finish(Scores& x, const Statistics& statistics,
                                         Fragments& products, float slope, const Stages& stages,
                                         const Slots& slots, int code) const {
    if constexpr (IS_SCORES) {
      if constexpr (Config::HAS_SCORE_MOD) begin_softcap(x, params.score_mod);
      if (code != TILE_FULL) steps.apply_mask(x, item(stages), code);
      if constexpr (Config::HAS_SCORE_MOD) {
        const float* lse_log2 = smem.statistics[stages.stage()];
        weigh_modified(x, products, lse_log2, steps.alibi_of(item(stages), slope));
      } else {
        steps.template exponentiate<SHIFT>(x, statistics);
      }
      smem.first.release(stages.stage());
      wait_for_place(slots);
    } else {
      take(x, statistics, slots);
      smem.first.release(stages.stage());
    }
  }

  // Converts scores with soft cap or ALiBi, after begin_softcap(), to P^T in place, because
  // products in flight still read the fragments. Also computes `products`, from which the other
  // block computes dS^T.
  __device__ __forceinline__ void weigh_modified(Scores& x, Fragments& products,
                                                 const float* lse_log2,
                                                 const AlibiBias<true>& alibi) const {
    using Target = typename Config::Target;
    weigh<SHIFT>(x, shared_address(lse_log2), params.score_mod, alibi,
                 [&](int k, const auto& weight, const auto& product) {
#pragma unroll
                   for (int n = 0; n < 2; ++n)
#pragma unroll
                     for (int i = 0; i < 4; ++i) x.x[0][2 * k + n][i] = weight.x[0][n][i];
                   to_a_operand<Target, typename Config::T>(products[k], product, 0);
                 });
  }

  // Block 0: sends P^T, or the values from which dS^T is computed, to the other block. Block 1:
  // stores dS^T to the workspace.
  __device__ __forceinline__ void hand_on(Fragments& fragments, const Fragments& products,
                                          const Scores& x, const Stages& stages,
                                          Slots& slots) const {
    Steps::to_fragments(fragments, x);
    if constexpr (IS_SCORES && Config::HAS_SCORE_MOD) {
      send(products, slots);
    } else if constexpr (IS_SCORES) {
      send(fragments, slots);
    } else {
      steps.store_gradients(fragments, item(stages));
    }
    slots.advance();
  }

  // Returns the index of this warp in the slots and barriers of the exchange.
  __device__ __forceinline__ static int warp() { return fresh_thread() / 32 - WARPS_OF_GROUP; }
  __device__ __forceinline__ uint32_t place(int slot) const {
    return shared_address(smem.exchange.probabilities[slot][warp()]) + fresh_thread() % 32 * 16;
  }
  __device__ __forceinline__ uint32_t full(int slot) const {
    return shared_address(&smem.exchange.full[slot][warp()]);
  }
  __device__ __forceinline__ uint32_t empty(int slot) const {
    return shared_address(&smem.exchange.empty[slot][warp()]);
  }

  // Block 0: waits until the other block has read the slot.
  __device__ __forceinline__ void wait_for_place(const Slots& slots) const {
    mbarrier_wait(empty(slots.stage()), slots.parity() ^ 1);
  }
  __device__ __forceinline__ void send(const Fragments& pt, const Slots& slots) const {
    const uint32_t at = address_in(PEER, place(slots.stage()));
    const uint32_t barrier = address_in(PEER, full(slots.stage()));
#pragma unroll
    for (int k = 0; k < PIECES; ++k) {
      store_remote_16(at + k * 512, {pt[k][0][0], pt[k][0][1], pt[k][0][2], pt[k][0][3]}, barrier);
    }
  }
  // Block 0: waits until the other block has arrived at this block's barriers for the last time.
  __device__ __forceinline__ void wait_for_peer(Slots& slots) const {
    if constexpr (IS_SCORES) {
#pragma unroll
      for (int i = 0; i < Config::SLOTS; ++i, slots.advance()) wait_for_place(slots);
    }
  }

  // Block 1: replaces dP^T by dS^T = P^T (dP^T - delta).
  __device__ __forceinline__ void take(Scores& x, const Statistics& delta,
                                       const Slots& slots) const {
    const int slot = slots.stage();
    const uint32_t at = place(slot);
    mbarrier_wait(full(slot), slots.parity());
#pragma unroll
    for (int k = 0; k < PIECES; ++k) {
      Steps::template weigh_gradients<SHIFT>(x, k, load_shared_16(at + k * 512), delta);
    }
    // NOTE: the loads must have returned before the slot is released: the other block may write
    // there a few hundred clocks later.
    hold(x.x[0]);
    __syncwarp();
    if (fresh_thread() % 32 == 0) {
      expect(slot);
      mbarrier_arrive_remote(address_in(PEER, empty(slot)));
    }
  }
  // Expects the bytes of the other block's next write to this warp's part of a slot.
  __device__ __forceinline__ void expect(int slot) const {
    mbarrier_expect(full(slot), Config::WARP_SLOT_BYTES);
  }
  __device__ __forceinline__ void expect_all() const {
    if constexpr (!IS_SCORES) {
      if (fresh_thread() % 32 != 0) return;
#pragma unroll
      for (int slot = 0; slot < Config::SLOTS; ++slot) expect(slot);
    }
  }
};

template <class Config>
__device__ __forceinline__ void make_barriers_of_pair(typename Config::Smem& smem) {
  constexpr int WARPS = Config::WARPS_THAT_COMPUTE;
  mbarrier_init(shared_address(&smem.keys_full), 1);
  smem.first.make(WARPS);
  smem.second.make(WARPS);
#pragma unroll
  for (int i = 0; i < Config::SLOTS * WARPS; ++i) {
    mbarrier_init(shared_address(&smem.exchange.full[0][0] + i), 1);
    mbarrier_init(shared_address(&smem.exchange.empty[0][0] + i), 1);
  }
  mbarriers_made();
}

template <class Config, PairRole ROLE>
__device__ __forceinline__ void run_role(const typename Config::Params& params,
                                         typename Config::Smem& smem, const DkdvBlock& block,
                                         const Sequence& sequence) {
  const DkdvOfPair<Config, ROLE> role{params, smem};
  if (threadIdx.x == 0) {
    role.load_keys();
    find_dkdv_work<Config>(smem.work, params.p, block, sequence);
  }
  __syncwarp();
  cluster_sync();  // the work and the barriers of both blocks are initialized
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x == 0) role.load();
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    role.compute();
  }
}

template <class Config>
__device__ __forceinline__ void dkdv_of_pair(const typename Config::Params& params) {
  const BwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const DkdvBlock block(p, Config::BLOCK_N, fresh_block() / Config::CLUSTER);
  const Sequence sequence(p, block.batch);
  if (block.key0 >= sequence.seqlen_k) return;  // both blocks return

  if (threadIdx.x == 0) {
    prefetch_maps(params.q, params.k, params.v, params.dout);
    make_barriers_of_pair<Config>(smem);
    smem.work.block = block;  // read by load_keys()
    smem.work.sequence = sequence;
  }
  if (cluster_rank() == 0) {
    run_role<Config, PairRole::SCORES>(params, smem, block, sequence);
  } else {
    run_role<Config, PairRole::GRADIENTS>(params, smem, block, sequence);
  }
}

}  // namespace flash_dist

// dQ, dK and dV on Hopper in one kernel: dS never leaves the multiprocessor. As in dkdv.cuh, a
// block owns its keys and computes their dK and dV. It also computes a part of dQ. A semaphore per
// query tile orders the blocks that add their parts.
//
//   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q        dQ = dS @ K
//
// Grid      x = one block for each key tile, group split and query split of each (batch, kv head)
//           pair of the chunk. A tile scheduler, an atomic counter, gives each block its tile.
// Block     Warpgroup 0: one thread loads, and threads of other warps store dQ to global memory.
//           Each of these threads describes its own items: one thread would be too slow for all.
//           Warpgroups 1 and 2: 64 keys each, as in dkdv.cuh. Warpgroup 3: dQ (dq_sum.cuh). At
//           head_dim 192/128 there are no registers for warpgroup 3: warpgroups 1 and 2 then
//           compute half of the columns of dQ each.
// Shared    K and V for the block's lifetime, STAGES stages of Q, dO, lse and delta, DS_STAGES of
//           dS^T, DQ_STAGES of dQ.
// Pipeline  The block's query tiles, for every query head of the split: head by head, the tiles of
//           a head in ascending order. If the first keys come first: tiles in descending order, all
//           heads of a tile before the next tile. This is the order of summation of dK and dV. If
//           the registers hold both S^T and dP^T, the product for dP^T runs while P^T is computed,
//           and that for dV while dS^T is computed. The warpgroups of keys do not wait for each
//           other, so that one multiplies while the other computes exponentials. The exception is
//           192/128, where each warpgroup reads all of dS^T after its product for dK.
//
// Order     The dQ of a query tile is summed over the key blocks visible to the tile, from the last
//           keys to the first, or from the first to the last (BwdParams::first_keys_first). The sum
//           is in fp32 in global memory, in the order of the registers of warpgroup 3. The first
//           block stores its part, and the next blocks add theirs. The last block adds the sum to
//           its part, scales and rounds the result, and writes it to dQ. The semaphore of a tile
//           counts the blocks that have added to the sum. find_order() numbers the blocks of a tile
//           0, 1, 2, ... without a gap. For query tiles without a visible key, the block of the
//           first keys sets dQ to zero.
//
// Choice    Under a causal mask the first keys are visible to the most queries. With the last keys
//           first, the blocks of a round (those that run together) begin at once, each at the
//           queries of its keys. But the longest blocks begin last, and from round to round the
//           blocks begin at queries further apart, until these no longer fit in L2. With the first
//           keys first, all blocks begin at the last queries, wait for each other's semaphores in
//           the first round, and then stay one step apart, however long the sequence is. Later
//           blocks are shorter.
//
// No deadlock: a block waits only for blocks of its own group (pair, group split, query split) that
// come earlier in the order. The tile scheduler assigns the tiles of a group in that order, so
// these blocks have smaller numbers: they run or have run, whatever the mask is, and in whatever
// order the hardware starts blocks. Of the blocks that have not ended, the one with the smallest
// number waits for no block. Within a block, all roles use the stages of a ring in the order of
// items. NOTE: the order follows from the mask's arrays and cu_seqlens, which each block reads
// itself. If they change during the kernel, blocks may wait forever.
#pragma once

#include "core/uncovered.cuh"
#include "ptx/semaphore.cuh"
#include "sm90/bwd/bias.cuh"
#include "sm90/bwd/dkdv_steps.cuh"
#include "sm90/bwd/dq_sum.cuh"
#include "sm90/dropout.cuh"

namespace flash_dist {

template <class Config>
struct FusedSm90 {
  using Steps = DkdvSm90Steps<Config>;
  using Cursor = DkdvCursor<Config>;
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
  using DqSum = flash_dist::DqSum<Config>;
  using Gradients = Ring<Config::DS_STAGES>;
  using Half = DqHalf<Config>;
  using Keys = uint32_t[Config::KEYS_IN_REGISTERS ? HEAD_DIM / 16 : 1][4];  // A operands

  using BiasTile = typename Config::BiasTile;
  static constexpr bool BIAS_IN_TILES = Config::BIAS_IN_BOXES;
  // True if the bias of an item is fetched into L2 before its stage is free. Measured with 16384
  // keys on an H200, relative to the speed without a bias: at head_dim 128, where the only stage is
  // refilled late, an fp32 bias reaches 0.71 with these fetches. At head_dim 64, it reaches 0.61
  // with them and 0.67 without.
  static constexpr bool PREFETCHES_BIAS = Config::BIAS_IS_FP32 && Config::DS_STAGES == 1;
  // True if a bias that is read only once gets the L2 priority EVICT_FIRST. At head_dim 128 this
  // costs time: 0.57 of the speed without a bias, instead of 0.71.
  static constexpr bool EVICTS_BIAS = Config::BIAS_IS_FP32 && !PREFETCHES_BIAS;
  using OwnBiasTile = std::conditional_t<Config::BIAS_IS_FP32, BwdSm90Fp32BiasTile<Config>,
                                         BwdSm90BiasTile<Config>>;

  // Named barriers. ONE_CONSUMER + 2 is that of warpgroup 3. KEYS_CLEARED: K has zeros for missing
  // keys. KEYS_READ: K and V may be overwritten. APART: see stagger().
  enum KeyBarrier : int { KEYS_CLEARED = ONE_CONSUMER + 3, KEYS_READ, APART };
  static constexpr int KEY_READERS = (Config::WARPGROUPS - 1) * WARPGROUP;
  static constexpr int DQ_WARPS = (Config::KEYS_MULTIPLY ? Config::CONSUMERS : 1) * WARPS_OF_GROUP;

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

  __device__ __forceinline__ static void make_barriers(Smem& smem) {
    mbarrier_init(shared_address(&smem.keys_full), 1);
    smem.barriers.make(Config::CONSUMERS * WARPS_OF_GROUP);
#pragma unroll
    for (int i = 0; i < Config::DQ_ITEMS; ++i) mbarrier_init(shared_address(&smem.described[i]), 1);
#pragma unroll
    for (int i = 0; i < Config::DS_STAGES; ++i) {
      mbarrier_init(shared_address(&smem.ds_full[i]), Config::CONSUMERS * WARPS_OF_GROUP);
      mbarrier_init(shared_address(&smem.ds_empty[i]), DQ_WARPS);
    }
#pragma unroll
    for (int i = 0; i < Config::DQ_STAGES; ++i) {
      mbarrier_init(shared_address(&smem.dq_ready[i]), 1);
      mbarrier_init(shared_address(&smem.dq_done[i]), DQ_WARPS);
    }
    if constexpr (Config::KEYS_MULTIPLY) mbarrier_init(shared_address(&smem.dq_read), 1);
    if constexpr (BIAS_IN_TILES) {
#pragma unroll
      for (int i = 0; i < Config::DS_STAGES; ++i)
        mbarrier_init(shared_address(&smem.bias_full[i]), 1);
    }
  }

  // Loads the block's tiles in one thread, and describes each item while its copies are in flight.
  __device__ __forceinline__ void load() const {
    if (work.items == 0) return;
    steps.load_keys();
    FusedCursor<Config> cursor(p, work, 0);
    Stages stages;
#pragma unroll 1
    for (int i = 0; i < work.items; ++i, stages.advance()) {
      const int s = stages.stage();
      smem.barriers.wait_for_place(stages);
      steps.template load_queries<false>(cursor, s);
      describe(smem.item[s], cursor);
      mbarrier_arrive(shared_address(&smem.barriers.full[s]));
      if constexpr (BIAS_IN_TILES) load_bias(cursor, Gradients{stages.passed});
      cursor.next(p, work);
    }
  }

  // Stores dQ, in one thread. warp: the thread's index among those that store dQ. The thread has
  // its own stage of dQ, or shares the only stage with another thread. `ready` completes when a
  // part of dQ may be written to the stage, or when the sum may be read from the stage.
  __device__ __forceinline__ void store_dq(int warp) const {
    constexpr bool TAKES_TURNS = Config::DQ_THREADS > Config::DQ_STAGES;
    const int number = TAKES_TURNS ? 0 : warp;
    const uint32_t stage = shared_address(smem.dq[number]);
    const uint32_t ready = shared_address(&smem.dq_ready[number]);
    const uint32_t done = shared_address(&smem.dq_done[number]);
    const auto pass_on = [&] {
      if constexpr (TAKES_TURNS) mbarrier_arrive(shared_address(&smem.dq_read));
    };
    int parity = 0;
    if (warp < work.items) describe_dq(warp);
#pragma unroll 1
    for (int i = warp; i < work.items; i += Config::DQ_THREADS, parity ^= 1) {
      const DqItem& item = smem.dq_item[i % Config::DQ_ITEMS];
      DqOrder order = item.order;
      int tile = item.tile;
      bool takes = order.is_last && order.before > 0;
      if constexpr (TAKES_TURNS) {
        if (i > 0) mbarrier_wait(shared_address(&smem.dq_read), (i - 1) % 2);
      }
      if (!takes) mbarrier_arrive(ready);
      // Describe the next item while dQ is computed.
      if (i + Config::DQ_THREADS < work.items) describe_dq(i + Config::DQ_THREADS);
      if constexpr (TAKES_TURNS) {  // reads the item again: its values would be spilled
        order = item.order;
        tile = item.tile;
        takes = order.is_last && order.before > 0;
      }
      float* sum = p.dq_accum + static_cast<int64_t>(tile) * Config::DQ_FLOATS;
      if (order.before > 0) wait_for_semaphore(tile, order);
      if (takes) {
        mbarrier_expect(ready, Config::DQ_BYTES);
        load_bytes(stage, sum, Config::DQ_BYTES, ready);
      }
      mbarrier_wait(done, TAKES_TURNS ? i % 2 : parity);
      if (!order.exists() || order.is_last) {
        pass_on();
        continue;
      }
      if (order.before == 0) {
        store_bytes(sum, stage, Config::DQ_BYTES);
      } else {
        add_floats(sum, stage, Config::DQ_BYTES);
      }
      commit_stores();
      if constexpr (TAKES_TURNS) wait_until_read<0>();
      pass_on();
      wait_until_written();
      add_release(semaphore_of(tile));
    }
  }

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

  // Computes dQ, in warpgroup 3.
  __device__ __forceinline__ void sum_queries() const {
    if (work.items == 0) return;
    DqSum sum;
    mbarrier_wait(shared_address(&smem.keys_full), 0);
    barrier_sync(KEYS_CLEARED, KEY_READERS);
    Gradients place;
    int dq_stage = 0, dq_parity = 0;
    // NOTE: the number of items is read again in each step: kept in a register, it would be
    // spilled.
#pragma unroll 1
    for (; static_cast<int>(place.passed) < work.items; place.advance()) {
      mbarrier_wait(shared_address(&smem.ds_full[place.stage()]), place.parity());
      const int number = place.passed % Config::DQ_ITEMS;
      mbarrier_wait(shared_address(&smem.described[number]), place.passed / Config::DQ_ITEMS % 2);
      const DqItem& item = smem.dq_item[number];
      const DqOrder order = item.order;
      const uint32_t ds = uniform(shared_address(smem.ds[place.stage()]));
#pragma unroll
      for (int part = 0; part < DqSum::PARTS; ++part) {
        const uint32_t stage = shared_address(smem.dq[dq_stage]) + part * DqSum::BYTES;
        if (order.exists()) sum.multiply(ds, shared_address(smem.k), part);
        if (part == DqSum::PARTS - 1) arrive_with_warp(smem.ds_empty[place.stage()]);
        if (part == 0) mbarrier_wait(shared_address(&smem.dq_ready[dq_stage]), dq_parity);
        if (order.is_last) {
          if (order.before > 0) sum.add(stage);
          sum.finish(stage, p.softmax_scale, DqRows(p, work, item), part * DqSum::COLUMNS);
        } else if (order.exists()) {
          sum.put(stage);
          fence_proxy_async();
        }
      }
      arrive_with_warp(smem.dq_done[dq_stage]);
      if (++dq_stage == Config::DQ_STAGES) dq_stage = 0, dq_parity ^= 1;
    }
    barrier_arrive(KEYS_READ, KEY_READERS);
  }

 private:
  // Loads the bias of the item at the cursor to where the item's dS^T will be.
  __device__ __forceinline__ void load_bias(const Cursor& cursor, const Gradients& place) const {
    const uint32_t full = shared_address(&smem.bias_full[place.stage()]);
    BoxPlace at{work.key0 * Config::BIAS_PANELS, params.bias_rows == 1 ? 0 : cursor.row0(), 0,
                (work.head + cursor.head_in_group) * params.bias_axes.head_kv,
                work.batch * params.bias_axes.batch};
    if constexpr (PREFETCHES_BIAS) prefetch_bias(at);
    wait_for_place(place);
    mbarrier_expect(
        full, Config::CONSUMERS * Config::BIAS_PANELS * params.bias_rows * BiasTile::ROW_BYTES);
#pragma unroll
    for (int half = 0; half < Config::CONSUMERS; ++half)
#pragma unroll
      for (int panel = 0; panel < Config::BIAS_PANELS; ++panel, at.column += BiasTile::COLUMNS) {
        const uint32_t to = bias_tile(half, place) + panel * Config::DS_BYTES;
        if constexpr (EVICTS_BIAS) {
          load_box(to, params.bias, at, full, caching_of_bias(params));
        } else {
          load_box(to, params.bias, at, full);
        }
      }
  }
  // Fetches the bias at `at` into L2, while its stage is still in use.
  __device__ __forceinline__ void prefetch_bias(BoxPlace at) const {
#pragma unroll
    for (int i = 0; i < Config::CONSUMERS * Config::BIAS_PANELS; ++i) {
      prefetch_box(params.bias, at);
      at.column += BiasTile::COLUMNS;
    }
  }
  // Returns the address of the bias of the keys of warpgroup `half`.
  __device__ __forceinline__ uint32_t bias_tile(int half, const Gradients& place) const {
    return shared_address(smem.ds[place.stage()]) + half * BiasTile::BYTES;
  }
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

  // Arrives at a barrier, once per warp.
  __device__ __forceinline__ static void arrive_with_warp(uint64_t& barrier) {
    __syncwarp();
    if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&barrier));
  }

  // Returns the number of tiles of a head in dq_accum, which pads a head to complete tiles of 128
  // queries.
  __device__ __forceinline__ int tiles_per_head() const {
    return (p.seqlen_q + STATISTICS_ALIGNMENT - 1) / STATISTICS_ALIGNMENT *
           (STATISTICS_ALIGNMENT / BLOCK_M);
  }

  // Describes the item at the cursor, for the warpgroups of keys.
  __device__ __forceinline__ void describe(FusedItem& item, const Cursor& cursor) const {
    item.row0 = cursor.row0();
    item.head_in_group = cursor.head_in_group;
    const int4* known = cursor.known(p, work);
    if (known != nullptr) item.known = *known;
    item.code[0] = tile_code(p, work, item, 0);
    item.code[1] = tile_code(p, work, item, 1);
  }

  // Describes item `number` for the computation of dQ.
  __device__ __forceinline__ void describe_dq(int number) const {
    const FusedCursor<Config> cursor(p, work, number);
    DqItem& item = smem.dq_item[number % Config::DQ_ITEMS];
    const int m = cursor.row0() / BLOCK_M;
    const int4* known = cursor.known(p, work);
    item.row0 = m * BLOCK_M;
    item.head_in_group = cursor.head_in_group;
    item.tile = (work.block.unit * p.group + cursor.head_in_group) * tiles_per_head() + m;
    item.order = find_order<Config::BLOCK_N>(p, work, known == nullptr ? int4{} : *known, m);
    mbarrier_arrive(shared_address(&smem.described[number % Config::DQ_ITEMS]));
  }

  __device__ __forceinline__ int* semaphore_of(int tile) const { return p.dq_turns + 1 + tile; }

  // Waits until every earlier block has added its part, and makes these parts visible to this
  // thread's copies.
  __device__ __forceinline__ void wait_for_semaphore(int tile, const DqOrder& order) const {
    while (load_acquire(semaphore_of(tile)) != order.before) {
    }
    fence_proxy_async_global();
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
    if constexpr (!Config::KEYS_MULTIPLY) barrier_arrive(KEYS_CLEARED, KEY_READERS);
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
      hand_over();
    }
    barrier_sync(KEYS_READ, KEY_READERS);
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
      if (Config::KEYS_MULTIPLY && stages.passed > 0) hand_over();
      wait_for_place(place);
      wait_for_bias(place);
      store_zeros(thread, place);  // the other half of the keys may be visible
      arrive_ds(thread, place);
      if constexpr (Config::KEYS_MULTIPLY) {
        sum_half(thread, place, [&] { release(thread, stages); });
      }
    }
  }

  // Computes this warpgroup's half of the columns of dQ, after which the caller must call
  // hand_over(). One earlier product may still be in flight; calls after() when it is complete.
  template <class After>
  __device__ __forceinline__ void sum_half(const Thread& thread, const Gradients& place,
                                           const After& after) const {
    const Half columns{thread.half};
    const uint32_t ds = shared_address(smem.ds[0]);
    const uint32_t keys = shared_address(smem.k);
    const uint32_t stage = shared_address(smem.dq[0]);
    typename Half::Panel panel;
    typename Half::Rest rest;
    mbarrier_wait(shared_address(&smem.ds_full[0]), place.parity());
    rest.issue(ds, columns.rest_of_keys(keys));
    wgmma_wait<1>();
    after();
    panel.issue(ds, columns.panel_of_keys(keys));
    const int number = place.passed % Config::DQ_ITEMS;
    mbarrier_wait(shared_address(&smem.described[number]), place.passed / Config::DQ_ITEMS % 2);
    const DqItem& item = smem.dq_item[number];
    const DqOrder order = item.order;
    const bool adds = order.exists() && !order.is_last;
    mbarrier_wait(shared_address(&smem.dq_ready[0]), place.parity());
    wgmma_wait<1>();
    hold(rest.x[0]);
    if (adds) rest.put(columns.rest_of_stage(stage));
    wgmma_wait<0>();
    hold(panel.x[0]);
    arrive_with_warp(smem.ds_empty[0]);
    if (adds) {
      panel.put(columns.panel_of_stage(stage));
    } else if (order.is_last) {
      finish(panel, columns.panel_of_stage(stage), item, columns.panel());
      finish(rest, columns.rest_of_stage(stage), item, columns.rest());
    }
  }
  // Writes columns of dQ. The stage holds the sum of earlier blocks, if there are any.
  template <class Columns>
  __device__ __forceinline__ void finish(Columns& columns, uint32_t stage, const DqItem& item,
                                         int column) const {
    if (item.order.before > 0) columns.add(stage);
    columns.finish(stage, p.softmax_scale, DqRows(p, work, item), column);
  }
  // Reports that this warp has written its part of dQ, or has read the sum. Called in the next
  // step, after the first product of that step has been issued.
  __device__ __forceinline__ void hand_over() const {
    fence_proxy_async();
    arrive_with_warp(smem.dq_done[0]);
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
          const uint32_t tile = bias_tile(thread.half, place);
          clear_bias(tile, item.row0);
          OwnBiasTile{params, tile}.template exponentiate<SHIFT>(pt, lse);
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
    if (Config::KEYS_MULTIPLY && stages.passed > 0) hand_over();
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
      wait_for_place(place);
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
      sum_half(thread, place, [&] {
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

  // Waits until this stage of dS^T has been read.
  __device__ __forceinline__ void wait_for_place(const Gradients& place) const {
    mbarrier_wait(shared_address(&smem.ds_empty[place.stage()]), place.parity() ^ 1);
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

// Zeroes dq of query tiles without a visible key. Only the blocks of key 0 and query split 0 do so.
template <class Config>
__device__ __forceinline__ void clear_masked_queries(const BwdParams& p, const DkdvBlock& block,
                                                     const Sequence& sequence) {
  const bool masks_some = p.mask.kind != MaskKind::BAND || p.mask.left < UNBOUNDED ||
                          p.mask.right < UNBOUNDED || sequence.seqlen_k == 0;
  if (block.key0 > 0 || block.query_split > 0 || !masks_some) return;
  const DsLayout layout = ds_layout(p, sequence);
  const int heads_per_split = p.group / p.group_split;
  const int tiles = (sequence.seqlen_q + MASK_TILE - 1) / MASK_TILE;
  const int lane = threadIdx.x % 32;
  const auto mask_of = [&](int head_in_group) {
    return Mask(p.mask,
                MaskPlace(p.mask, sequence, block.batch, block.head_kv * p.group + head_in_group));
  };
#pragma unroll 1
  for (int i0 = threadIdx.x / 32 * 32; i0 < heads_per_split * tiles; i0 += Config::THREADS) {
    // Each lane tests one tile. All lanes then write the rows of the fully masked tiles.
    const int own = i0 + lane;
    const bool exists = own < heads_per_split * tiles;
    const bool visible =
        !exists ||
        is_visible(p, mask_of(block.split * heads_per_split + own / tiles), layout, own % tiles);
#pragma unroll 1
    for (unsigned masked = __ballot_sync(0xffffffffu, !visible); masked != 0;
         masked &= masked - 1) {
      const int i = i0 + __ffs(masked) - 1;
      const int m = i % tiles;
      uint16_t* dq =
          head_begin(p.dq, block.batch, block.head_kv, block.split * heads_per_split + i / tiles) +
          static_cast<int64_t>(sequence.q0) * p.dq.row;
      const int end = min((m + 1) * MASK_TILE, sequence.seqlen_q);
#pragma unroll 1
      for (int row = m * MASK_TILE + lane / ROW_LANES; row < end; row += 32 / ROW_LANES)
#pragma unroll 1
        for (int column = lane % ROW_LANES * 8; column < p.head_dim; column += ROW_LANES * 8) {
          store_global_16(dq + row * p.dq.row + column, {0, 0, 0, 0});
        }
    }
  }
}

// Returns the query split of a block. Removes it from place.group, which then numbers the pair and
// the group split. The last queries come first: with a causal mask, most keys are visible to them.
__device__ __forceinline__ int take_query_split(BlockPlace& place, const BwdParams& p) {
  const int groups = p.units * p.group_split;
  const int rank = place.group / groups;
  place.group -= rank * groups;
  return p.query_split - 1 - rank;
}

template <class Config>
__device__ __forceinline__ void fused_sm90_block(const typename Config::Params& params) {
  const BwdParams& p = params.p;
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  using Kernel = FusedSm90<Config>;

  if (threadIdx.x == 0) {
    BlockPlace place(fetch_next(p.dq_turns), p.order);
    prefetch_map(params.q);
    prefetch_map(params.k);
    prefetch_map(params.v);
    prefetch_map(params.dout);
    if constexpr (Kernel::BIAS_IN_TILES) prefetch_map(params.bias);
    Kernel::make_barriers(smem);
    mbarriers_made();
    const int last = (p.seqlen_k + Config::BLOCK_N - 1) / Config::BLOCK_N - 1;
    if (!p.first_keys_first) place.tile = last - place.tile;
    const int query_split = take_query_split(place, p);
    DkdvBlock block(p, Config::BLOCK_N, place);
    block.query_split = query_split;
    const Sequence sequence(p, block.batch);
    smem.work.block = block;
    smem.work.sequence = sequence;
    if (block.key0 < sequence.seqlen_k) find_dkdv_work<Config>(smem.work, p, block, sequence);
  }
  __syncthreads();  // the work and the barriers are initialized
  clear_masked_queries<Config>(p, smem.work.block, smem.work.sequence);
  if (smem.work.block.key0 >= smem.work.sequence.seqlen_k) return;

  const Kernel kernel{params, smem};
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0) return;
    if (warp == 0) {
      kernel.load();
    } else if (warp <= Config::DQ_THREADS) {
      kernel.store_dq(warp - 1);
    }
  } else if (threadIdx.x < (1 + Config::CONSUMERS) * WARPGROUP) {
    take_registers<Config::CONSUMER_REGISTERS>();
    kernel.compute();
  } else if constexpr (!Config::KEYS_MULTIPLY) {
    give_registers<Config::DQ_REGISTERS>();
    kernel.sum_queries();
  }
}

}  // namespace flash_dist

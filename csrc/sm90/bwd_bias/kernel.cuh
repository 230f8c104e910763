// The gradient of a bias on Hopper: dS summed over the batch entries and heads that share it.
//
//   S = Q @ K.T   P = exp2(S + bias - lse)   dP = dO @ V.T   dS = P (dP - delta)   dBias += dS
//
// Grid      One block per multiprocessor. Block b computes tiles b, b + grid, b + 2 grid, ... A
//           tile has 128 x 128 sums over all its visits (core/bias_gradient.cuh) in ascending
//           order, or over one split of them. So the order of summation depends on shapes alone.
// Block     One loading warp (loader.cuh), and 2 warpgroups of 64 queries each. A warpgroup
//           computes S and dP of a visit together. It does not wait for the other: one multiplies
//           while the other computes exponentials. The sums stay in registers and are written once,
//           rounded if the bias has 16 bits and its visits are not split.
// Shared    A ring of STAGES panels: 64 columns of Q and K, or of dO and V. A ring of BIAS_STAGES
//           for the bias of a tile, which is loaded once for all visits. Items, which describe
//           visits.
// Barriers  full, empty, bias_full and bias_empty. Nothing else needs a barrier: each thread reads
//           lse and delta of its two rows from global memory, where an earlier kernel wrote them.
//
// Estimate  With D = head_dim, a visit takes 4 D flops per score, 0.4 of a backward's 10 D. Its
//           panels are 2 (128 + 128) D * 2 bytes for 128 * 128 scores, 64 flops per byte: at 9.1
//           TB/s from L2, at most 580 TFLOP/s for any D. At 500, a backward of 540 (D 128) or 450
//           (D 64) would take 1.43 or 1.36 times as long with this kernel. A bias without broadcast
//           has one visit and moves 2 + 2 bytes per score: 1 ns per 1000 scores from HBM; the
//           backward takes 1.4 (D 64) or 2.4 ns (D 128). An H200 reached 230 (D 64) and 340 TFLOP/s
//           (D 128) with 4 visits of 4096 x 4096, and 3 TB/s with one. If the warpgroups only wait
//           and release, it is 390 and 470: panels then come at 6.1 and 7.3 TB/s. So panels for
//           128 x 128 scores take more than half of the time; larger tiles have no registers.
#pragma once

#include "core/ds_scale.h"
#include "ptx/wgmma.cuh"
#include "sm90/bias.cuh"
#include "sm90/bwd_bias/launch.h"
#include "sm90/bwd_bias/loader.cuh"
#include "sm90/rows.cuh"

namespace flash_dist {

__device__ __forceinline__ float2 bias_of_two(const float2& x) {
  return {bias_of_fp32(__float_as_uint(x.x)), bias_of_fp32(__float_as_uint(x.y))};
}

// The bias of a warpgroup's 64 queries and of 128 keys, in the stages that the loader fills.
template <class Config>
struct BiasStages {
  using Tile = typename Config::Tile;
  using T = typename Config::T;

  typename Config::Smem& smem;
  const BiasParams& bias;
  SliceRing<Config::BIAS_STAGES> ring{};

  __device__ __forceinline__ int stages() const { return bias.is_fp32 ? 2 : 1; }

  // Waits for the tile's bias. Orders the copies of the loader before the reads of all visits.
  __device__ __forceinline__ void begin(const BiasVisitItem&, int, int) const {
    auto next = ring;
#pragma unroll 1
    for (int i = 0; i < stages(); ++i, next.advance()) {
      mbarrier_wait(shared_address(&smem.bias_full[next.stage]), next.parity);
    }
  }
  // Tells the loader that this warp has read the tile's bias. Orders the reads before the copies of
  // a later tile.
  __device__ __forceinline__ void end() {
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < stages(); ++i, ring.advance()) {
      if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&smem.bias_empty[ring.stage]));
    }
  }

  // Calls weigh(numbers). numbers(n, h) returns the biases of this lane's two adjacent keys in
  // column tile n, for its upper or lower row (h = 0 or 1). It must be called in ascending order of
  // n, then h. Within a panel, n changes only the lower bits of the address, by the swizzle.
  template <class Weigh>
  __device__ __forceinline__ void read(Weigh weigh) const {
    const int lane = fresh_thread() % 32;
    const int row = consumer() * MASK_TILE + warp_of_consumer() * 16 + lane % 16;
    const uint32_t own = shared_address(smem.bias[ring.stage]) + Tile::offset(row, lane / 16);
    uint32_t four[4];  // {upper rows, lower rows} x {8 keys, next 8 keys}
    weigh([&](int n, int h) {
      if (n % 2 == 0 && h == 0) ldmatrix_x4(four, (own ^ n % 8 * 16) + n / 8 * Tile::BYTES);
      return bias_of_pair<T>(four[n % 2 * 2 + h]);
    });
  }
  template <class Weigh>
  __device__ __forceinline__ void read_fp32(Weigh weigh) const {
    const int lane = fresh_thread() % 32;
    const int row = consumer() * MASK_TILE + warp_of_consumer() * 16 + lane / 4;
    const uint32_t part = Tile::offset(row, lane % 4 / 2) + lane % 2 * 8;
    auto second = ring;
    second.advance();
    const uint32_t own[2] = {shared_address(smem.bias[ring.stage]) + part,
                             shared_address(smem.bias[second.stage]) + part};
    weigh([&](int n, int h) {
      return bias_of_two(load_shared_8((own[n / 8] ^ n % 4 * 32) + n % 8 / 4 * Tile::BYTES +
                                       h * 8 * Tile::ROW_BYTES));
    });
  }
};

// Like BiasStages, for a bias that TMA cannot load. Each thread copies its own elements from global
// to shared memory, so no barrier is needed.
template <class Config>
struct OwnBias {
  using T = typename Config::T;

  typename Config::Smem& smem;
  const BiasParams& bias;

  static constexpr int SLOT_BYTES = Config::CONSUMERS * WARPGROUP * 16;  // 16 bytes per thread

  __device__ __forceinline__ uint32_t slot(int i) const {
    return shared_address(smem.bias) + i * SLOT_BYTES + (fresh_thread() - WARPGROUP) * 16;
  }

  // Copies the tile's bias. Rows and columns past the end repeat the last query or key.
  __device__ __forceinline__ void begin(const BiasVisitItem& item, int seqlen_q,
                                        int seqlen_k) const {
    const int lane = fresh_thread() % 32;
    const int row = item.row0 + consumer() * MASK_TILE + warp_of_consumer() * 16 + lane / 4;
    const int64_t own = item.batch * bias.batch + item.head * bias.head;
    const int64_t rows[2] = {own + min(row, seqlen_q - 1) * bias.row,
                             own + min(row + 8, seqlen_q - 1) * bias.row};
    const int first = item.key0 + lane % 4 * 2;
    const auto* data = static_cast<const uint8_t*>(bias.data);
    const auto key = [&](int i) { return min(first + i, seqlen_k - 1) * bias.key; };
    if (bias.is_fp32) {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int64_t left = key(n * 8), right = key(n * 8 + 1);
        store_shared_16(slot(n), {load_constant_4(data + 4 * (rows[0] + left)),
                                  load_constant_4(data + 4 * (rows[0] + right)),
                                  load_constant_4(data + 4 * (rows[1] + left)),
                                  load_constant_4(data + 4 * (rows[1] + right))});
      }
      return;
    }
    const auto pair = [&](int h, int i) {
      return load_bias_pair(data + 2 * (rows[h] + key(i)), data + 2 * (rows[h] + key(i + 1)));
    };
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      store_shared_16(slot(n),
                      {pair(0, n * 16), pair(1, n * 16), pair(0, n * 16 + 8), pair(1, n * 16 + 8)});
    }
  }
  __device__ __forceinline__ void end() const {}

  template <class Weigh>
  __device__ __forceinline__ void read(Weigh weigh) const {
    const uint32_t own = slot(0);
    uint4 x;
    weigh([&](int n, int h) {
      if (n % 2 == 0 && h == 0) x = load_shared_16(own + n / 2 * SLOT_BYTES);
      return bias_of_pair<T>(n % 2 == 0 ? (h == 0 ? x.x : x.y) : (h == 0 ? x.z : x.w));
    });
  }
  template <class Weigh>
  __device__ __forceinline__ void read_fp32(Weigh weigh) const {
    const uint32_t own = slot(0);
    weigh([&](int n, int h) { return bias_of_two(load_shared_8(own + n * SLOT_BYTES + h * 8)); });
  }
};

template <class Config>
struct BiasGradientSm90 {
  using T = typename Config::T;
  using Target = typename Config::Target;
  using Tile = typename Config::Tile;
  using Smem = typename Config::Smem;
  using Item = BiasVisitItem;
  using Scores = Accumulator<1, Config::BLOCK_N / 8>;
  using Stages = SliceRing<Config::STAGES>;
  using Bias =
      std::conditional_t<Config::BIAS == BiasLoads::BOXES, BiasStages<Config>, OwnBias<Config>>;
  static constexpr int NT = Config::BLOCK_N / 8;

  const BiasGradientSm90Params& params;
  Smem& smem;
  const BwdParams& p = params.p;

  __device__ __forceinline__ static void make_barriers(Smem& smem) {
    constexpr int WARPS = Config::CONSUMERS * WARPS_OF_GROUP;
#pragma unroll
    for (int i = 0; i < Config::STAGES; ++i) {
      mbarrier_init(shared_address(&smem.full[i]), 1);
      mbarrier_init(shared_address(&smem.empty[i]), WARPS);
    }
#pragma unroll
    for (int i = 0; i < Config::BIAS_STAGES; ++i) {
      mbarrier_init(shared_address(&smem.bias_full[i]), 1);
      mbarrier_init(shared_address(&smem.bias_empty[i]), WARPS);
    }
  }

  // Computes the rows of a warpgroup in all tiles of the block.
  __device__ __forceinline__ void compute() const {
    Scores sum;
    sum.clear();
    Stages stages;
    Bias bias{smem, p.bias};
#pragma unroll 1
    for (unsigned i = 0;; ++i) {
      wait_for_data(stages);
      const Item& item = smem.item[i % Config::ITEMS];
      if (item.flags & Item::END) return;
      if (item.flags & Item::EMPTY) {
        release<1>(stages);
      } else {
        visit(sum, item, stages, bias);
      }
      if (item.flags & Item::LAST) {
        store(sum, item);
        sum.clear();
      }
    }
  }

 private:
  // Returns the first row of this thread in a tile; the other one is 8 rows below.
  __device__ __forceinline__ static int own_row() {
    return consumer() * MASK_TILE + warp_of_consumer() * 16 + fresh_thread() % 32 / 4;
  }

  // Waits for a stage. Orders the loader's copies, and for a visit's first stage its stores to the
  // item, before this thread's reads.
  __device__ __forceinline__ void wait_for_data(const Stages& stages) const {
    mbarrier_wait(shared_address(&smem.full[stages.stage]), stages.parity);
  }
  // Tells the loader that this warp is done with the next COUNT stages. Orders wgmma's reads,
  // which have ended, and the reads of earlier visits' items before the loader's next writes.
  template <int COUNT>
  __device__ __forceinline__ void release(Stages& stages) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; ++i, stages.advance()) {
      if (fresh_thread() % 32 == 0) mbarrier_arrive(shared_address(&smem.empty[stages.stage]));
    }
  }

  // Starts the product of the next COUNT stages: rows of Q by rows of K, or of dO by rows of V.
  template <int COUNT>
  __device__ __forceinline__ void issue(Scores& c, Stages stages) const {
    auto next = stages;
#pragma unroll
    for (int i = 0; i < COUNT; ++i, next.advance()) wait_for_data(next);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < COUNT; ++i, stages.advance()) {
      const auto& stage = smem.stage[stages.stage];
      const uint64_t a = Tile::by_rows(
          uniform(shared_address(stage.queries) + consumer() * MASK_TILE * Tile::ROW_BYTES));
      const uint64_t b = Tile::by_rows(uniform(shared_address(stage.keys)));
      if (i == 0) {
        wgmma<T, false, false, true>(c.x[0], a, b);
      } else {
        wgmma<T, false, false>(c.x[0], a, b);
      }
#pragma unroll
      for (int k = 1; k < Tile::COLUMNS / 16; ++k) {
        wgmma<T, false, false>(c.x[0], a + Tile::rows_step(k), b + Tile::rows_step(k));
      }
    }
    wgmma_commit();
  }

  // Adds dS of a visit to the sums.
  __device__ __forceinline__ void visit(Scores& sum, const Item& item, Stages& stages,
                                        Bias& bias) const {
    float lse[2], delta[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = item.statistics + own_row() + h * 8;
      lse[h] = p.lse_log2[row];
      delta[h] = p.delta[row];
    }
    if (Config::BIAS == BiasLoads::ELEMENTS && item.flags & Item::FIRST) {
      bias.begin(item, p.seqlen_q, p.seqlen_k);
    }
    Scores s, dp;
    // S = Q @ K.T, dP = dO @ V.T                          [64, BLOCK_N]
    issue<Config::PANELS>(s, stages);
    Stages of_dp = stages;
#pragma unroll
    for (int i = 0; i < Config::PANELS; ++i) of_dp.advance();
    issue<Config::V_PANELS>(dp, of_dp);
    wgmma_wait<1>();
    hold(s.x[0]);
    release<Config::PANELS>(stages);
    apply_mask(s, item);
    if (Config::BIAS == BiasLoads::BOXES && item.flags & Item::FIRST) {
      bias.begin(item, p.seqlen_q, p.seqlen_k);
    }
    // P = exp2(S * scale + bias - lse)
    exponentiate(s, bias, lse);
    if (item.flags & Item::LAST) bias.end();
    wgmma_wait<0>();
    hold(dp.x[0]);
    release<Config::V_PANELS>(stages);
    // dBias += P * (dP - delta)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // NOTE: rows past the last query may belong to the next document; their P may be NaN.
      const bool exists = lse[h] != INFINITY;
      const float minus = delta[h] * (1.0f / DS_SCALE<T>);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          const float weight = s.x[0][n][e];
          // NOTE: dP of a masked score may be NaN, because V of its key may be.
          if (exists && weight != 0.0f) {
            sum.x[0][n][e] = fmaf(weight, dp.x[0][n][e] - minus, sum.x[0][n][e]);
          }
        }
    }
  }

  // Replaces scores by P.
  __device__ __forceinline__ void exponentiate(Scores& s, const Bias& bias,
                                               const float (&lse)[2]) const {
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const auto weigh = [&](auto numbers) {
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 both = numbers(n, h);
          float& first = s.x[0][n][2 * h];
          float& second = s.x[0][n][2 * h + 1];
          first = exp2_approx(fmaf(first, scale_log2, fmaf(both.x, LOG2_E, -lse[h])));
          second = exp2_approx(fmaf(second, scale_log2, fmaf(both.y, LOG2_E, -lse[h])));
        }
    };
    if (p.bias.is_fp32) {
      bias.read_fp32(weigh);
    } else {
      bias.read(weigh);
    }
  }

  // Sets masked scores to -inf.
  __device__ __forceinline__ void apply_mask(Scores& s, const Item& item) const {
    const int codes[2] = {item.code[2 * consumer()], item.code[2 * consumer() + 1]};
    if (codes[0] == TILE_FULL && codes[1] == TILE_FULL) return;
    const Sequence sequence(p, item.batch);
    const Mask mask(p.mask, MaskPlace(p.mask, sequence, item.batch, item.head));
#pragma unroll
    for (int w = 0; w < NT / 4; ++w)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word =
            mask.word(item.row0 + own_row() + h * 8, item.key0 + w * 32, codes[w / 2]) >>
            fresh_thread() % 4 * 2;
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (!(word >> (n * 8 + e) & 1)) s.x[0][w * 4 + n][2 * h + e] = -INFINITY;
          }
      }
  }

  // Writes the sums of this warpgroup's rows.
  __device__ __forceinline__ void store(const Scores& sum, const Item& item) const {
    const int64_t keys = p.seqlen_k;
    const int first = consumer() * MASK_TILE;
    const int rows = p.seqlen_q - item.row0 - first, columns = p.seqlen_k - item.key0;
    const int64_t at = item.sum + first * keys;
    if (!params.rounds) {
      store_fp32(sum, static_cast<float*>(params.sums) + at, rows, columns);
    } else if (keys % 8 == 0) {
      store_rows<Target, T>(sum, static_cast<uint16_t*>(params.sums) + at, keys, rows, columns);
    } else {
      store_each(sum, static_cast<uint16_t*>(params.sums) + at, rows, columns);
    }
  }
  __device__ __forceinline__ void store_fp32(const Scores& sum, float* to, int rows,
                                             int columns) const {
    const bool in_pairs = p.seqlen_k % 2 == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = own_row() % MASK_TILE + h * 8, column = fresh_thread() % 4 * 2;
      float* own = to + static_cast<int64_t>(row) * p.seqlen_k + column;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float left = sum.x[0][n][2 * h], right = sum.x[0][n][2 * h + 1];
        if (in_pairs) {
          if (column + n * 8 < columns) *reinterpret_cast<float2*>(own + n * 8) = {left, right};
        } else {
          if (column + n * 8 < columns) own[n * 8] = left;
          if (column + n * 8 + 1 < columns) own[n * 8 + 1] = right;
        }
      }
    }
  }
  // Writes rounded sums whose rows do not begin at multiples of 16 bytes.
  __device__ __forceinline__ void store_each(const Scores& sum, uint16_t* to, int rows,
                                             int columns) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = own_row() % MASK_TILE + h * 8, column = fresh_thread() % 4 * 2;
      uint16_t* own = to + static_cast<int64_t>(row) * p.seqlen_k + column;
      if (row >= rows) continue;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint32_t two = pack<Target, T>(sum.x[0][n][2 * h], sum.x[0][n][2 * h + 1]);
        if (column + n * 8 < columns) own[n * 8] = static_cast<uint16_t>(two);
        if (column + n * 8 + 1 < columns) own[n * 8 + 1] = static_cast<uint16_t>(two >> 16);
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void bias_gradient_sm90_block(const BiasGradientSm90Params& params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  using Kernel = BiasGradientSm90<Config>;
  if (threadIdx.x == 0) {
    prefetch_maps(params.q, params.k, params.v, params.dout);
    if (Config::BIAS == BiasLoads::BOXES) prefetch_map(params.bias);
    Kernel::make_barriers(smem);
    mbarriers_made();
  }
  __syncthreads();  // the barriers exist before any warp uses them
  if (threadIdx.x < WARPGROUP) {
    give_registers<Config::LOADER_REGISTERS>();
    if (threadIdx.x < 32) BiasGradientLoader<Config>{params, smem}.load();
  } else {
    take_registers<Config::CONSUMER_REGISTERS>();
    Kernel{params, smem}.compute();
  }
}

}  // namespace flash_dist

// The gradient of a bias: dS summed over the axes along which the bias is broadcast.
//
//   S = Q @ K.T   P = exp2(S - lse)   dP = dO @ V.T   dS = P (dP - delta)   dBias += dS
//
// Grid      x = key tile, query tile, head and batch entry of the bias, split.
// Block     4 warps; each owns 16 queries of a tile of 64 x 64 scores. A block visits all batch
//           entries and query heads that share its part of the bias, or one split of them, in
//           ascending order. dBias stays in registers and is written once. With packed documents,
//           a block visits only documents that have scores in its tile.
// Shared    2 stages of 64 columns of Q and K, or of dO and V.
#pragma once

#include "core/bias.cuh"
#include "core/bias_visits.cuh"
#include "core/config.h"
#include "core/dropout.cuh"
#include "core/ds_scale.h"
#include "core/mask.cuh"
#include "core/pipeline.cuh"
#include "core/scores.cuh"
#include "core/sequence.cuh"
#include "core/tile.cuh"
#include "native/entry.h"

namespace flash_dist {

template <class Plan, class Target, class T, int HEAD_DIM, int HEAD_DIM_V, int PLAN,
          bool DROPS_ = false>
struct AnyBiasConfig : Config<Plan, Target, T, HEAD_DIM, HEAD_DIM_V> {
  static constexpr bool DROPS = DROPS_;
  static constexpr int BLOCK_M = BIAS_TILE, BLOCK_N = BIAS_TILE;
  static constexpr int COLUMNS = 64;  // columns of Q and K, or of dO and V, per step
  static constexpr int STAGES = 2;
  static_assert(Plan::WARPS * 16 == BLOCK_M && BIAS_TILE == MASK_TILE);

  struct Stage {
    alignas(128) Element<T> a[BLOCK_M * COLUMNS];  // rows of Q or dO
    alignas(128) Element<T> b[BLOCK_N * COLUMNS];  // rows of K or V
  };
  struct Smem {
    Stage stage[STAGES];  // reused for the warps' sums over queries
  };
  static constexpr int SMEM_BYTES = sizeof(Smem);
  static_assert(SMEM_BYTES <= smem_plan_bytes(PLAN));
};

// The tile of the bias gradient that a block computes, and the block's visits.
struct BiasBlock {
  int key_tile, query_tile;
  BiasPart part;

  __device__ __forceinline__ explicit BiasBlock(const BiasGradientParams& p) {
    const int number = fresh_block(), rest = number / p.key_tiles;
    key_tile = number % p.key_tiles;
    query_tile = rest % p.query_tiles;
    part = {p, rest / p.query_tiles};
  }
};

// Returns the mask's code, such as TILE_FULL, for the score tile at row0 and key0.
__device__ __forceinline__ int code_of_tile(const Mask& mask, int row0, int key0) {
  if (!mask.is_list()) {
    const KeyRange range = mask.range(row0, MASK_TILE);
    if (!range.touches(key0, MASK_TILE)) return TILE_EMPTY;
    return range.covers(key0, MASK_TILE) ? TILE_FULL : TILE_ROWS;
  }
  const TileList& list = mask.p.by_query[0];
  const int* ends = list.begin + mask.plane * mask.p.query_tiles + row0 / MASK_TILE;
  int low = ends[0], high = ends[1];
  while (low < high) {
    const int middle = (low + high) / 2;
    const int4 entry = list.entries[middle];
    if (entry.x == key0 / MASK_TILE) return entry.y;
    if (entry.x < key0 / MASK_TILE) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return TILE_EMPTY;
}

// multiply(c, a, row0, b) of Products, the family's matrix product, adds A @ B^T to c. A: this
// warp's rows, from row0 on, of the tile at address a. B: the tile at b. Both have COLUMNS columns.
template <class Config, class Products>
struct BiasGradient {
  using T = typename Config::T;
  using E = Element<T>;
  static constexpr int COLUMNS = Config::COLUMNS;
  static constexpr int NT = Config::BLOCK_N / 8;
  using Scores = Accumulator<1, NT>;
  using Stage = typename Config::Stage;

  const BiasGradientParams& params;
  const BwdParams& p;
  const uint32_t stages;
  const BiasBlock block;
  const int row0, key0;  // first query and key of the tile
  const int warp_row0;
  const int steps_qk, steps;  // steps per visit; the first steps_qk compute S

  __device__ __forceinline__ BiasGradient(const BiasGradientParams& all,
                                          typename Config::Smem& smem)
      : params(all),
        p(all.p),
        stages(shared_address(&smem)),
        block(all),
        row0(block.query_tile * BIAS_TILE),
        key0(block.key_tile * BIAS_TILE),
        warp_row0(threadIdx.x / 32 * 16),
        steps_qk((p.head_dim + COLUMNS - 1) / COLUMNS),
        steps(steps_qk + (p.head_dim_v + COLUMNS - 1) / COLUMNS) {}

  __device__ __forceinline__ Mask mask_of(const BiasVisit& visit, const Sequence& sequence) const {
    return Mask(p.mask, MaskPlace(p.mask, sequence, visit.batch, visit.head));
  }

  __device__ __forceinline__ bool is_packed() const { return p.packing.cu_seqlens_q != nullptr; }

  // Returns whether visit `number` of a packed call has visible scores. The mask is a band.
  __device__ __forceinline__ bool is_visible(int number) const {
    const BiasVisit visit(params, block.part, number);
    const Sequence sequence(p, visit.batch);
    const Mask mask = mask_of(visit, sequence);
    return row0 < sequence.seqlen_q && mask.band_begin(row0) < key0 + BIAS_TILE &&
           mask.band_end(min(row0 + BIAS_TILE, sequence.seqlen_q) - 1) > key0;
  }

  // Sets `first` to the first visit and returns the number of visits. Of packed documents, counts
  // only the visible ones. Returns 0 if all visits have the same mask and it masks the whole tile.
  __device__ __forceinline__ int count_visits(int& first) const {
    first = block.part.first;
    if (!is_packed()) {
      if (p.mask.batch_planes != 0 || p.mask.head_planes != 0) return block.part.end - first;
      const BiasVisit visit(params, block.part, first);  // all visits have the same mask
      const Mask mask = mask_of(visit, Sequence(0, 0, p.seqlen_q, p.seqlen_k));
      return code_of_tile(mask, row0, key0) == TILE_EMPTY ? 0 : block.part.end - first;
    }
    int visits = 0;
#pragma unroll 1
    for (int number = block.part.end - 1; number >= block.part.first; --number) {
      if (is_visible(number)) ++visits, first = number;
    }
    return visits;
  }

  // Moves `number` to the next visit, or to block.part.end after the last one.
  __device__ __forceinline__ void advance(int& number) const {
    do {
      ++number;
    } while (is_packed() && number < block.part.end && !is_visible(number));
  }

  __device__ __forceinline__ uint32_t a(int s) const {
    return stages + s * static_cast<int>(sizeof(Stage));
  }
  __device__ __forceinline__ uint32_t b(int s) const {
    return a(s) + static_cast<int>(offsetof(Stage, b));
  }

  // The copies of one step.
  struct Copies {
    OperandCopy<Config, Config::BLOCK_M, COLUMNS> a;
    OperandCopy<Config, Config::BLOCK_N, COLUMNS> b;
  };

  // Starts the copies of a step of a visit.
  __device__ __forceinline__ void fetch(Copies& copies, int number, int step, int s) const {
    const BiasVisit visit(params, block.part, number);
    const Sequence sequence(p, visit.batch);
    const int head_kv = visit.head / p.group;
    const int head_in_group = visit.head - head_kv * p.group;
    const RowSpan exist = mask_of(visit, sequence).keys_that_exist(visit.batch);
    const RowSpan queries{0, sequence.seqlen_q - row0}, keys{exist.first - key0, exist.end - key0};
    const bool first = step < steps_qk;
    const View& rows = first ? p.q : p.dout;
    const View& columns = first ? p.k : p.v;
    const int column = (first ? step : step - steps_qk) * COLUMNS;
    const int left = (first ? p.head_dim : p.head_dim_v) - column;
    copies.a.fetch(a(s),
                   head_begin<E>(rows, visit.batch, head_kv, head_in_group) +
                       (sequence.q0 + row0) * rows.row + column,
                   rows.row, queries, left);
    copies.b.fetch(b(s),
                   head_begin<E>(columns, visit.batch, head_kv, 0) +
                       (sequence.k0 + key0) * columns.row + column,
                   columns.row, keys, left);
  }

  // dBias += P * (dP - delta), from S and dP.
  __device__ __forceinline__ void add(Scores& sum, Scores& s, Scores& dp, int number) const {
    const BiasVisit visit(params, block.part, number);
    const Sequence sequence(p, visit.batch);
    const Mask mask = mask_of(visit, sequence);
    const int code = code_of_tile(mask, row0, key0);
    if (code == TILE_EMPTY) return;
    const int first = row0 + warp_row0;
    apply_score_mod<Config::DROPS ? Tanh::NONE : Tanh::FAST>(
        s, p.scores,
        {alibi_slope(p.scores, visit.batch, visit.head),
         first + sequence.seqlen_k - sequence.seqlen_q, key0});
    if constexpr (sizeof(E) > 2) begin_or_add<AddBias>(s, visit, sequence);
    if (code != TILE_FULL) apply_mask(s, mask, first, key0, code);
    if constexpr (Config::DROPS) {
      const DropoutParams& dropout = dropout_of(params);
      drop(dp, dropout, {sequence_head(p, visit.batch, visit.head), first, key0}, dropout.scale);
    }
    const float scale_log2 = p.scores.scale * LOG2_E;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = statistics_begin(p, visit.batch, visit.head, sequence.q0) + first +
                          h * 8 + threadIdx.x % 32 / 4;
      const float lse = p.lse_log2[row];  // +inf past the last row
      const float delta = p.delta[row] * (1.0f / DS_SCALE<T>);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) {
          const float weight = exp2_approx(fmaf(s.x[0][n][e], scale_log2, -lse));
          // NOTE: dP of a masked score may be NaN, because V of a masked key may be.
          if (weight != 0.0f) sum.x[0][n][e] += weight * (dp.x[0][n][e] - delta);
        }
    }
  }

  // Writes partial sums of dBias, [splits, batches, heads, queries, keys]. If the bias is broadcast
  // along queries or keys, that axis has one sum per tile.
  __device__ __forceinline__ void store(Scores& sum, float* shared) const {
    const int lane = threadIdx.x % 32;
    const int keys = params.sums_keys ? params.key_tiles : p.seqlen_k;
    const int queries = params.sums_queries ? params.query_tiles : p.seqlen_q;
    float* out = params.parts + int64_t{block.part.index} * queries * keys;
    if (params.sums_keys) sum_keys(sum);
    if (params.sums_queries) {
      sum_queries(sum, shared);
      const int key = threadIdx.x;
      if (key >= BIAS_TILE) return;
      float x = 0.0f;
#pragma unroll
      for (int warp = 0; warp < Config::WARPS; ++warp) x += shared[warp * BIAS_TILE + key];
      out += static_cast<int64_t>(block.query_tile) * keys;
      if (!params.sums_keys && key0 + key < keys) out[key0 + key] = x;
      if (params.sums_keys && key == 0) out[block.key_tile] = x;
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + warp_row0 + h * 8 + lane / 4;
      if (row >= queries) continue;
      float* at = out + static_cast<int64_t>(row) * keys;
      if (params.sums_keys) {
        if (lane % 4 == 0) at[block.key_tile] = sum.x[0][0][2 * h];
        continue;
      }
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = key0 + n * 8 + lane % 4 * 2 + e;
          if (key < keys) at[key] = sum.x[0][n][2 * h + e];
        }
    }
  }

  // Sets the accumulator to the bias for 16-bit dtypes, and to 0 for fp32.
  __device__ __forceinline__ void begin(Scores& s, int number) const {
    s.clear();
    if constexpr (sizeof(E) == 2) {
      const BiasVisit visit(params, block.part, number);
      begin_or_add<BeginWithBias>(s, visit, Sequence(p, visit.batch));
    }
  }

 private:
  template <class Put>
  __device__ __forceinline__ void begin_or_add(Scores& s, const BiasVisit& visit,
                                               const Sequence& sequence) const {
    const BiasPlace place{visit.batch, visit.head, row0 + warp_row0, key0};
    add_bias<T, false, Put, !Config::DROPS>(s, p.bias, place, sequence.seqlen_q, sequence.seqlen_k);
  }

  // Sums each row over its keys. Each lane gets the sum in its first element of the row, else 0.
  __device__ __forceinline__ static void sum_keys(Scores& sum) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = 0.0f;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        x += sum.x[0][n][2 * h] + sum.x[0][n][2 * h + 1];
        sum.x[0][n][2 * h] = sum.x[0][n][2 * h + 1] = 0.0f;
      }
      x += __shfl_xor_sync(0xffffffffu, x, 1);
      x += __shfl_xor_sync(0xffffffffu, x, 2);
      sum.x[0][0][2 * h] = x;
    }
  }

  // Writes each warp's sums over its queries to shared memory, [warp, key].
  __device__ __forceinline__ static void sum_queries(const Scores& sum, float* shared) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = sum.x[0][n][e] + sum.x[0][n][2 + e];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
        if (lane < 4) shared[threadIdx.x / 32 * BIAS_TILE + n * 8 + lane * 2 + e] = x;
      }
    __syncthreads();
  }
};

template <class Config, class Products>
__device__ __forceinline__ void bias_gradient_block(const BiasGradientParams& params) {
  using Target = typename Config::Target;
  using Kernel = BiasGradient<Config, Products>;
  using Scores = typename Kernel::Scores;
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  auto& smem = *reinterpret_cast<typename Config::Smem*>(smem_bytes);
  const Kernel kernel(params, smem);
  Scores sum, s, dp;
  sum.clear();
  typename Kernel::Copies copies;
  int next, next_step = 0;  // visit and step to fetch next
  const int visits = kernel.count_visits(next);
  int number = next, step = 0;  // visit and step to compute next
  run_pipeline<Target, Config::STAGES>(
      visits * kernel.steps,
      [&](int, int stage) {
        kernel.fetch(copies, next, next_step, stage);
        if (++next_step == kernel.steps) next_step = 0, kernel.advance(next);
      },
      [&](int stage) {
        copies.a.land(kernel.a(stage));
        copies.b.land(kernel.b(stage));
      },
      [&](int, int stage) {
        if (step == 0) {
          kernel.begin(s, number);
          dp.clear();
        }
        const uint32_t a = kernel.a(stage), b = kernel.b(stage);
        if (step < kernel.steps_qk) {
          Products::multiply(s, a, kernel.warp_row0, b);
        } else {
          Products::multiply(dp, a, kernel.warp_row0, b);
        }
        if (++step < kernel.steps) return;
        kernel.add(sum, s, dp, number);
        step = 0;
        number = next;  // the copies of this visit's first step are in flight
      });
  if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
  __syncthreads();  // all warps have read the stages
  kernel.store(sum, reinterpret_cast<float*>(smem_bytes));
}

template <class Config>
cudaError_t launch_bias_gradient(const KernelEntry& entry, const void* params,
                                 cudaStream_t stream) {
  const auto& p = *static_cast<const BiasGradientParams*>(params);
  const int64_t tiles = int64_t{p.query_tiles} * p.key_tiles;
  return launch_1d(entry, params, tiles * p.batches * p.heads * p.splits, stream);
}

}  // namespace flash_dist

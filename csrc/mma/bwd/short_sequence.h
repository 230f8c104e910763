// dQ, dK and dV of sequences of at most 64 queries and 64 keys, in one kernel. delta and dS stay on
// the multiprocessor, and nothing is summed in global memory.
//
//   delta = rowsum(dO * out) - dlse
//   S^T = K @ Q.T          P^T = exp2(S^T - lse)            dV += P^T @ dO
//   dP^T = V @ dO.T        dS^T = P^T (dP^T - delta)        dK += dS^T @ Q        dQ = dS @ K
//
// Grid      x = (batch, kv head) pair.
// Block     4 warps. For each query head of the group, a warp owns 16 keys and then 16 queries.
// Shared    K and V; Q, dO, lse, delta and dS^T of one query head.
//
// Several blocks share a multiprocessor: one copies while another computes.
#pragma once

#include "core/blocks.cuh"
#include "core/dot.cuh"
#include "core/ds_scale.h"
#include "core/mask.cuh"
#include "core/sequence.cuh"
#include "core/uncovered.cuh"
#include "mma/bwd/config.h"
#include "mma/fragments.cuh"

namespace flash_dist {

template <class Config>
struct ShortSequence {
  using Target = typename Config::Target;
  using T = typename Config::T;
  using Smem = typename Config::Smem;
  static constexpr int HEAD_DIM = Config::HEAD_DIM;
  static constexpr int HEAD_DIM_V = Config::HEAD_DIM_V;
  static constexpr int TILE = Config::TILE;
  static constexpr int SUB = Config::SUB_M;  // queries per pass
  using OperandK = Operand<HEAD_DIM>;
  using OperandV = Operand<HEAD_DIM_V>;
  using OperandS = Operand<TILE>;
  using Scores = Accumulator<1, SUB / 8>;  // a warp's keys x SUB queries
  using DkSum = Accumulator<1, HEAD_DIM / 8>;
  using DvSum = Accumulator<1, HEAD_DIM_V / 8>;

  const WholeParams& params;
  const BwdParams& p;
  const uint32_t smem;  // address of Smem
  const int seqlen_q, seqlen_k;

  __device__ __forceinline__ ShortSequence(const WholeParams& all, uint32_t smem_address,
                                           const Sequence& sequence)
      : params(all),
        p(all.p),
        smem(smem_address),
        seqlen_q(sequence.seqlen_q),
        seqlen_k(sequence.seqlen_k) {}

  __device__ __forceinline__ void run() const {
    if (p.packing.cu_seqlens_q != nullptr) fill_uncovered();
    load_keys();
    DkSum dk;
    DvSum dv;
    dk.clear();
    dv.clear();
#pragma unroll 1
    for (int head_in_group = 0; head_in_group < p.group; ++head_in_group) {
      load_queries(head_in_group);
      OutRow out;
      load_out(out, head_in_group);
      if constexpr (Target::HAS_CP_ASYNC) cp_async_wait<0>();
      __syncthreads();  // the copies have landed
      store_statistics(out, head_in_group);
      __syncthreads();  // lse and delta are stored
      if (row0() < seqlen_k) add(dk, dv, head_in_group);
      __syncthreads();  // dS^T is complete, and every warp has read Q
      if (row0() < seqlen_q) store_queries(head_in_group);
      __syncthreads();  // all reads are done: the next Q, or in the end dK and dV, may be written
    }
    dk.scale(gradient_scale<T>(p.softmax_scale));
    store(dk, k(), p.dk, 0, p.head_dim, place().sequence.k0, seqlen_k);
    store(dv, v(), p.dv, 0, p.head_dim_v, place().sequence.k0, seqlen_k);
  }

 private:
  // The work of the block. It is recomputed at each use, because the sums need the registers.
  struct Place {
    DkdvBlock block;
    Sequence sequence;

    __device__ __forceinline__ explicit Place(const BwdParams& p)
        : block(p, TILE), sequence(p, block.batch) {}
    __device__ __forceinline__ int head(const BwdParams& p, int head_in_group) const {
      return block.head_kv * p.group + head_in_group;
    }
  };
  __device__ __forceinline__ Place place() const { return Place(p); }

  // Addresses of the tiles, and of lse and delta.
  __device__ __forceinline__ uint32_t k() const { return smem + offsetof(Smem, k); }
  __device__ __forceinline__ uint32_t v() const { return smem + offsetof(Smem, v); }
  __device__ __forceinline__ uint32_t q() const { return smem + offsetof(Smem, q); }
  __device__ __forceinline__ uint32_t dout() const { return smem + offsetof(Smem, dout); }
  __device__ __forceinline__ uint32_t ds() const { return smem + offsetof(Smem, ds); }
  __device__ __forceinline__ uint32_t lse() const { return smem + offsetof(Smem, lse_log2); }
  __device__ __forceinline__ uint32_t delta() const { return smem + offsetof(Smem, delta); }

  // Returns the index of the warp's first key, which is also that of its first query.
  __device__ __forceinline__ static int row0() { return fresh_thread() / 32 * 16; }

  __device__ __forceinline__ Mask mask_of(int head_in_group) const {
    const Place at(p);
    return Mask(p.mask, MaskPlace(p.mask, at.sequence, at.block.batch, at.head(p, head_in_group)));
  }

  // Returns the mask's code for the block's only tile.
  __device__ __forceinline__ int code_of(const Mask& mask) const {
    if (mask.is_list()) {
      const TileList& list = p.mask.by_query[0];
      const int entry = list.begin[mask.plane];
      return entry < list.begin[mask.plane + 1] ? list.entries[entry].y : TILE_EMPTY;
    }
    const bool all = is_even(p.mask, false) && seqlen_k >= TILE;
    return all ? TILE_FULL : TILE_ROWS;
  }

  // Copies the existing rows of a view into a tile.
  template <int COLUMNS>
  __device__ __forceinline__ void load(uint32_t tile, const View& view, int head_in_group,
                                       int first_row, const RowSpan& rows, int columns) const {
    TileCopy<Target, TILE, COLUMNS, Config::THREADS> copy;
    const DkdvBlock block(p, TILE);
    copy.fetch(tile,
               head_begin(view, block.batch, block.head_kv, head_in_group) + first_row * view.row,
               view.row, rows, columns);
    copy.land(tile);
  }

  __device__ __forceinline__ void load_keys() const {
    const Place at(p);
    const RowSpan keys = mask_of(0).keys_that_exist(at.block.batch);
    load<HEAD_DIM>(k(), p.k, 0, at.sequence.k0, keys, p.head_dim);
    load<HEAD_DIM_V>(v(), p.v, 0, at.sequence.k0, keys, p.head_dim_v);
  }

  __device__ __forceinline__ void load_queries(int head_in_group) const {
    const Place at(p);
    const RowSpan rows{0, seqlen_q};
    load<HEAD_DIM>(q(), p.q, head_in_group, at.sequence.q0, rows, p.head_dim);
    load<HEAD_DIM_V>(dout(), p.dout, head_in_group, at.sequence.q0, rows, p.head_dim_v);
    if constexpr (Target::HAS_CP_ASYNC) cp_async_commit();
  }

  // A thread's columns of a row of out. LANES threads share a row.
  static constexpr int LANES = Config::THREADS / TILE;
  static constexpr int OUT_CHUNKS = HEAD_DIM_V / 8 / LANES;
  using OutRow = uint4[OUT_CHUNKS];
  __device__ __forceinline__ static int out_row() { return fresh_thread() / LANES; }
  __device__ __forceinline__ static int out_chunk(int i) {
    return i * LANES + fresh_thread() % LANES;
  }

  __device__ __forceinline__ void load_out(OutRow& out, int head_in_group) const {
    const Place at(p);
    const uint16_t* row = head_begin(params.out, at.block.batch, at.block.head_kv, head_in_group) +
                          (at.sequence.q0 + out_row()) * params.out.row;
#pragma unroll
    for (int i = 0; i < OUT_CHUNKS; ++i) {
      const bool exists = out_row() < seqlen_q && out_chunk(i) * 8 < p.head_dim_v;
      out[i] = exists ? load_global_16(row + out_chunk(i) * 8) : uint4{0, 0, 0, 0};
    }
  }

  // Stores delta, and lse in base 2. lse is +inf for rows past the end and rows without a key.
  __device__ __forceinline__ void store_statistics(const OutRow& out, int head_in_group) const {
    const Place at(p);
    const int row = out_row();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < OUT_CHUNKS; ++i) {
      const int offset = SwizzledRows<HEAD_DIM_V>::offset(row, out_chunk(i));
      sum = add_products<T>(out[i], load_shared_16(dout() + offset), sum);
    }
#pragma unroll
    for (int i = LANES / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
    if (fresh_thread() % LANES != 0) return;
    float of_row = -INFINITY;
    if (row < seqlen_q) {
      const int64_t i =
          lse_begin(p, at.block.batch, at.head(p, head_in_group), at.sequence.q0) + row;
      of_row = params.lse[i];
      if (params.dlse != nullptr) sum -= params.dlse[i];
    }
    store_shared_float(lse() + row * 4, of_row == -INFINITY ? INFINITY : of_row * LOG2_E);
    store_shared_float(delta() + row * 4, of_row == -INFINITY ? 0.0f : sum * DS_SCALE<T>);
  }

  __device__ __forceinline__ static void store_shared_float(uint32_t at, float x) {
    store_shared_4(at, __float_as_uint(x));
  }

  // Fills uncovered rows of dq, dk and dv with zeros.
  __device__ __forceinline__ void fill_uncovered() const {
    constexpr int THREADS = Config::THREADS;
    const DkdvBlock block(p, TILE);
    const Packing& packing = p.packing;
    const DocumentRows q(packing.cu_seqlens_q, block.batch, p.batch, p.total_q, p.seqlen_q);
    const DocumentRows k(packing.cu_seqlens_k, block.batch, p.batch, p.total_k, p.seqlen_k);
    if (!(q.uncovered | k.uncovered)) return;
    for_uncovered_rows<THREADS>(
        packing.cu_seqlens_q, block.batch, p.batch, p.total_q, p.seqlen_q, 0, 1, [&](int row) {
          for (int head_in_group = 0; head_in_group < p.group; ++head_in_group) {
            zero_row<2>(p.dq, block.head_kv, head_in_group, row, p.head_dim);
          }
        });
    for_uncovered_rows<THREADS>(packing.cu_seqlens_k, block.batch, p.batch, p.total_k, p.seqlen_k,
                                0, 1, [&](int row) {
                                  zero_row<2>(p.dk, block.head_kv, 0, row, p.head_dim);
                                  zero_row<2>(p.dv, block.head_kv, 0, row, p.head_dim_v);
                                });
  }

  // Adds a query head's contribution to dK and dV of the warp's keys, and stores dS^T of this head.
  __device__ __forceinline__ void add(DkSum& dk, DvSum& dv, int head_in_group) const {
    const float scale_log2 = p.softmax_scale * LOG2_E;
    const Mask mask = mask_of(head_in_group);
    const int code = code_of(mask);
#pragma unroll 1
    for (int sub = 0; sub < seqlen_q; sub += SUB) {
      // S^T = K @ Q.T                                    [16, SUB]
      // P^T = exp2(S^T * scale - lse)
      Scores pt, dst;
      pt.clear();
      const auto a_k = OperandK::a(k() + row0() * HEAD_DIM * 2);
      gemm_abt<Target, T, HEAD_DIM, Config::UNROLL, 1, SUB / 8>(pt, a_k, OperandK::b(q()), sub);
      if (code != TILE_FULL) apply_mask_transposed(pt, mask, sub, row0(), code);
      each(pt, lse() + sub * 4,
           [&](float& x, int, float of_query) { x = exp2_approx(fmaf(x, scale_log2, -of_query)); });
      // dV += P^T @ dO                                   [16, HEAD_DIM_V]
#pragma unroll
      for (int i = 0; i < SUB / 16; ++i) {
        uint32_t rP[1][4];
        to_a_operand<Target, T>(rP, pt, i);
        gemm_ab_step<Target, T, HEAD_DIM_V>(dv, rP, OperandV::b_trans(dout()), sub + i * 16);
      }
      // dP^T = V @ dO.T                                  [16, SUB]
      // dS^T = P^T * (dP^T - delta)
      dst.clear();
      const auto a_v = OperandV::a(v() + row0() * HEAD_DIM_V * 2);
      gemm_abt<Target, T, HEAD_DIM_V, Config::UNROLL, 1, SUB / 8>(dst, a_v, OperandV::b(dout()),
                                                                  sub);
      each(dst, delta() + sub * 4, [&](float& x, int i, float of_query) {
        x = pt.x[0][i / 4][i % 4] * minus_delta<T>(x, of_query);
      });
      // dK += dS^T @ Q                                   [16, HEAD_DIM]
#pragma unroll
      for (int i = 0; i < SUB / 16; ++i) {
        uint32_t rDs[1][4];
        to_a_operand<Target, T>(rDs, dst, i);
        store_ds(rDs[0], sub / 8 + 2 * i);
        gemm_ab_step<Target, T, HEAD_DIM>(dk, rDs, OperandK::b_trans(q()), sub + i * 16);
      }
    }
  }

  // Calls f(element, index, value of `statistic` for its query) for each element.
  template <class F>
  __device__ __forceinline__ static void each(Scores& scores, uint32_t statistic, F f) {
    const int column = fresh_thread() % 4 * 2;
#pragma unroll
    for (int n = 0; n < SUB / 8; ++n) {
      const float2 x = load_shared_8(statistic + (n * 8 + column) * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) f(scores.x[0][n][i], n * 4 + i, i % 2 == 0 ? x.x : x.y);
    }
  }

  // Stores dS^T of the warp's keys and 16 queries. chunk: index of their first 16-byte chunk.
  __device__ __forceinline__ void store_ds(const uint32_t (&r)[4], int chunk) const {
    using Layout = SwizzledRows<TILE>;
    const int lane = fresh_thread() % 32;
    const int row = row0() + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      store_shared_4(ds() + Layout::offset(row + i % 2 * 8, chunk + i / 2) + lane % 4 * 4, r[i]);
    }
  }

  // Computes and writes dQ = dS @ K of the warp's queries  [16, HEAD_DIM]
  __device__ __forceinline__ void store_queries(int head_in_group) const {
    Accumulator<1, HEAD_DIM / 8> dq;
    dq.clear();
    const auto a_ds = OperandS::b(ds());  // ldmatrix_x4_trans then reads the A operand of dS
#pragma unroll 1
    for (int key0 = 0; key0 < seqlen_k; key0 += 16) {
      uint32_t rDs[1][4];
      ldmatrix_x4_trans(rDs[0], a_ds.at(key0, row0() / 16));
      gemm_ab_step<Target, T, HEAD_DIM>(dq, rDs, OperandK::b_trans(k()), key0);
    }
    dq.scale(gradient_scale<T>(p.softmax_scale));
    store(dq, q(), p.dq, head_in_group, p.head_dim, place().sequence.q0, seqlen_q);
  }

  // Writes the warp's rows of a gradient. They go through rows of `tile` that no other warp uses.
  template <int NT>
  __device__ __forceinline__ void store(const Accumulator<1, NT>& c, uint32_t tile,
                                        const View& view, int head_in_group, int columns,
                                        int first_row, int rows) const {
    const DkdvBlock block(p, TILE);
    store_rows<Target, T, NT * 8, 1>(c, tile + row0() * NT * 16,
                                     head_begin(view, block.batch, block.head_kv, head_in_group) +
                                         (first_row + row0()) * view.row,
                                     view.row, rows - row0(), columns);
  }
};

template <class Config>
__device__ __forceinline__ void whole_block(const WholeParams& params) {
  extern __shared__ __align__(128) uint8_t smem_bytes[];
  const Sequence sequence(params.p, DkdvBlock(params.p, Config::TILE).batch);
  ShortSequence<Config>(params, shared_address(smem_bytes), sequence).run();
}

template <class Config>
const char* refuse_whole(const void* params) {
  const BwdParams& p = *static_cast<const BwdParams*>(params);
  if (p.scores.has_score_mod) return "it neither caps scores nor has ALiBi";
  if (p.batch_invariant) return "which sequences fit its tile follows from the longest";
  if (p.batch == 0) return "there is no sequence, and no block to fill rows of none";
  const bool fits = p.seqlen_q <= Config::TILE && p.seqlen_k <= Config::TILE;
  return fits ? nullptr : "its tile does not hold a whole sequence";
}

template <class Config>
cudaError_t launch_whole(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  struct Grid {
    int64_t tiles, groups;
  };
  WholeParams all = *static_cast<const WholeParams*>(params);
  BwdParams& p = all.p;
  p.by_num_heads_kv = make_divisor(p.num_heads_kv);
  p.by_group_split = make_divisor(1);
  return launch_in_order(entry, p, Grid{1, p.units}, all, stream);
}

}  // namespace flash_dist

// The rows of one batch entry: everything of its axis, or a document of packed tensors.
#pragma once

#include "core/params.h"

namespace flash_dist {

constexpr int STATISTICS_ALIGNMENT = 128;  // rows; the largest query tile

struct Sequence {
  int q0, k0;  // first rows in the tensors
  int seqlen_q, seqlen_k;

  __device__ __forceinline__ Sequence(int q, int k, int length_q, int length_k)
      : q0(q), k0(k), seqlen_q(length_q), seqlen_k(length_k) {}

  template <class Params>
  __device__ __forceinline__ Sequence(const Params& p, int batch)
      : q0(0), k0(0), seqlen_q(p.seqlen_q), seqlen_k(p.seqlen_k) {
    if (p.packing.cu_seqlens_q != nullptr) {
      q0 = p.packing.cu_seqlens_q[batch];
      k0 = p.packing.cu_seqlens_k[batch];
      // Never longer than what grid and workspace were made for.
      seqlen_q = min(p.packing.cu_seqlens_q[batch + 1] - q0, p.seqlen_q);
      seqlen_k = min(p.packing.cu_seqlens_k[batch + 1] - k0, p.seqlen_k);
    }
  }
};

// Element 0 of lse of a query head: [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q].
template <class Params>
__device__ __forceinline__ int64_t lse_begin(const Params& p, int batch, int head, int q0) {
  if (p.packing.cu_seqlens_q != nullptr) return static_cast<int64_t>(head) * p.total_q + q0;
  return (static_cast<int64_t>(batch) * p.num_heads_kv * p.group + head) * p.seqlen_q;
}

// Row 0 of a query head in the statistics of the backward, a multiple of STATISTICS_ALIGNMENT. A
// head has rows_padded rows: seqlen_q rounded up, or, packed, total_q + 128 * batch rounded up,
// where a document begins at its first token plus 128 times its number, rounded down.
template <class Params>
__device__ __forceinline__ int64_t statistics_begin(const Params& p, int batch, int head, int q0) {
  constexpr int A = STATISTICS_ALIGNMENT;
  if (p.packing.cu_seqlens_q != nullptr) {
    return static_cast<int64_t>(head) * p.rows_padded + (q0 + A * batch) / A * A;
  }
  return (static_cast<int64_t>(batch) * p.num_heads_kv * p.group + head) * p.rows_padded;
}

}  // namespace flash_dist

// Finds the rows of a batch entry (its whole axis, or a document of packed tensors), and the
// addresses of a head's rows.
#pragma once

#include "core/params.h"

namespace flash_dist {

constexpr int STATISTICS_ALIGNMENT = 128;  // rows; at least the largest query tile

// A document's rows on a packed axis. The contents of cu_seqlens are unchecked, so the rows are
// clamped to the axis and to `longest` rows, for which grid and workspace were made.
struct DocumentRows {
  int begin, length;
  int next;        // next element of cu_seqlens: first row of the next document, or end of the last
  bool uncovered;  // there are uncovered rows next to this document or after all documents

  // Finds the rows of the document with index `number`. documents: how many there are. If there are
  // none, document 0 has no rows.
  __device__ __forceinline__ DocumentRows(const int* cu_seqlens, int number, int documents,
                                          int total, int longest)
      : begin(on_axis(cu_seqlens[number], total)),
        next(on_axis(cu_seqlens[min(number + 1, documents)], total)) {
    length = min(max(next - begin, 0), longest);
    const int last = last_end(cu_seqlens, documents, total);
    // NOTE: | instead of ||, which would wait for one load before it issues the next.
    uncovered = ((number == 0) & (begin > 0)) | (end() < next) | (last < total);
  }
  __device__ __forceinline__ int end() const { return begin + length; }

  // Returns the end of the last document.
  __device__ __forceinline__ static int last_end(const int* cu_seqlens, int documents, int total) {
    return on_axis(cu_seqlens[documents], total);
  }

 private:
  __device__ __forceinline__ static int on_axis(int row, int total) {
    return min(max(row, 0), total);
  }
};

// True if other kernels compute the sequences of few queries on many keys. The constructor of
// Sequence then sets their seqlen_q to 0.
template <class Params>
__device__ __forceinline__ bool leaves_few(const Params&) {
  return false;
}
__device__ __forceinline__ bool leaves_few(const FwdParams& p) { return p.leaves_few; }

struct Sequence {
  int q0, k0;  // first query and first key in the tensors
  int seqlen_q, seqlen_k;
  bool uncovered_q;  // DocumentRows::uncovered of the queries

  __device__ __forceinline__ Sequence(int q, int k, int length_q, int length_k)
      : q0(q), k0(k), seqlen_q(length_q), seqlen_k(length_k), uncovered_q(false) {}

  template <class Params>
  __device__ __forceinline__ Sequence(const Params& p, int batch)
      : Sequence(0, 0, p.seqlen_q, p.seqlen_k) {
    if (p.packing.cu_seqlens_q != nullptr) {
      const DocumentRows q(p.packing.cu_seqlens_q, batch, p.batch, p.total_q, p.seqlen_q);
      const DocumentRows k(p.packing.cu_seqlens_k, batch, p.batch, p.total_k, p.seqlen_k);
      q0 = q.begin;
      k0 = k.begin;
      seqlen_q = q.length;
      seqlen_k = k.length;
      uncovered_q = q.uncovered;
      if (leaves_few(p) && is_few_queries(seqlen_q, seqlen_k)) seqlen_q = 0;
    }
  }
};

// Returns the index in lse of query 0 of a query head. lse is [batch, num_heads_q, seqlen_q], or
// packed [num_heads_q, total_q], where q0 is the first token of the document.
template <class Params>
__device__ __forceinline__ int64_t lse_begin(const Params& p, int batch, int head, int q0) {
  if (p.packing.cu_seqlens_q != nullptr) return static_cast<int64_t>(head) * p.total_q + q0;
  return (static_cast<int64_t>(batch) * p.num_heads_kv * p.group + head) * p.seqlen_q;
}

// Returns the statistics row of query 0 of a query head, a multiple of STATISTICS_ALIGNMENT. A head
// has rows_padded rows: seqlen_q rounded up. Packed: total_q + 128 * batch rounded up; a document
// starts at its first token plus 128 times its index, rounded down.
template <class Params>
__device__ __forceinline__ int64_t statistics_begin(const Params& p, int batch, int head, int q0) {
  constexpr int A = STATISTICS_ALIGNMENT;
  if (p.packing.cu_seqlens_q != nullptr) {
    return static_cast<int64_t>(head) * p.rows_padded + (q0 + A * batch) / A * A;
  }
  return (static_cast<int64_t>(batch) * p.num_heads_kv * p.group + head) * p.rows_padded;
}

// Returns the address of element 0 of row 0 of query head head_kv * group + head_in_group. For k
// and v head_in_group is 0.
template <class Element = uint16_t>
__device__ __forceinline__ Element* head_begin(const View& view, int batch, int head_kv,
                                               int head_in_group) {
  return static_cast<Element*>(view.data) + batch * view.batch + head_kv * view.head_kv +
         head_in_group * view.head_group;
}

}  // namespace flash_dist

// Which keys a query sees. Every mask of this library is an interval of keys per query row; full
// and causal are the two that need no memory. The loops over tiles ask here which tiles hold any
// visible score and which hold only visible ones.
#pragma once

#include <cuda_runtime_api.h>  // __host__ and __device__, for g++ too

#include <cstdint>

namespace flash_dist {

struct Mask {
  int seqlen_q, seqlen_k;
  int causal;

  __host__ __device__ __forceinline__ int offset() const { return seqlen_k - seqlen_q; }

  // Query i sees the keys [0, key_end(i)).
  __host__ __device__ __forceinline__ int key_end(int i) const {
    if (!causal) return seqlen_k;
    const int end = i + offset() + 1;
    return end < 0 ? 0 : (end < seqlen_k ? end : seqlen_k);
  }

  // Key j is seen by the queries [query_begin(j), seqlen_q).
  __host__ __device__ __forceinline__ int query_begin(int j) const {
    if (!causal) return 0;
    const int begin = j - offset();
    return begin < 0 ? 0 : (begin < seqlen_q ? begin : seqlen_q);
  }
};

}  // namespace flash_dist

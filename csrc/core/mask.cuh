// Which keys a query sees. Every mask of this library is an interval of keys per query row; full
// and causal are the two that need no memory. The loops over tiles ask here which tiles hold any
// visible score and which hold only visible ones.
#pragma once

namespace flash_dist {

struct Mask {
  int seqlen_q, seqlen_k;
  int causal;

  // Query i sees the keys [0, key_end(i)).
  __device__ __forceinline__ int key_end(int i) const {
    if (!causal) return seqlen_k;
    const int end = i + (seqlen_k - seqlen_q) + 1;
    return end < 0 ? 0 : (end < seqlen_k ? end : seqlen_k);
  }
};

}  // namespace flash_dist

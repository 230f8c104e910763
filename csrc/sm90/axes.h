// The axes of a call's tensors, for their maps.
#pragma once

#include "sm90/maps.h"

namespace flash_dist {

// The row axis of q and what is like it, of k and v, and their other axes.
struct CallAxes {
  int rows_q, rows_k;
  Axes q, k;

  template <class Params>  // FwdParams or BwdParams
  explicit CallAxes(const Params& p) {
    const bool packed = p.packing.cu_seqlens_q != nullptr;
    const int batches = packed ? 1 : p.batch;
    rows_q = packed ? p.total_q : p.seqlen_q;
    rows_k = packed ? p.total_k : p.seqlen_k;
    q = {p.group, p.num_heads_kv, batches};
    k = {1, p.num_heads_kv, batches};
  }
};

}  // namespace flash_dist

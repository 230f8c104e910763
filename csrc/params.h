// Kernel arguments: plain structs, filled by the dispatcher, passed by value. Sizes in elements
// unless a name says bytes.
#pragma once

#include <cstdint>

namespace flash_dist {

// A [batch, seqlen, num_heads_kv, group, head_dim] view of 16-bit elements with a contiguous last
// axis. A 4-D tensor of num_heads_q heads is the view whose heads_kv stride is group * heads_group
// stride; k and v have one head per group.
struct View {
  void* data;
  int64_t batch;  // strides
  int64_t row;
  int64_t head_kv;
  int64_t head_group;
};

struct FwdParams {
  View q;      // [batch, seqlen_q, num_heads_kv, group, head_dim]
  View k, v;   // [batch, seqlen_k, num_heads_kv, 1, head_dim]
  View out;    // as q
  float* lse;  // [batch, num_heads_q, seqlen_q], natural logarithm
  int batch, seqlen_q, seqlen_k, num_heads_kv, group;
  int causal;  // bottom-right aligned: key j is seen by query i if j <= i + seqlen_k - seqlen_q
  int heads_together;  // see core/schedule.cuh
  float softmax_scale;
};

struct DeltaParams {
  View out, dout;     // [batch, seqlen_q, num_heads_kv, group, head_dim]
  const float* lse;   // [batch, num_heads_q, seqlen_q]
  const float* dlse;  // as lse, or null
  float*
      lse_log2;  // [batch, num_heads_q, rows_padded]; +inf for rows without a key and for padding
  float* delta;  // as lse_log2; 0 for padding
  int batch, seqlen_q, rows_padded, num_heads_kv, group;
};

// One chunk of the backward: units [unit_begin, unit_begin + units) of (batch, kv head), keys of
// tiles [key_begin, key_end). A unit covers all query heads of its group.
struct BwdParams {
  View q, k, v, dout;
  View dq, dk, dv;
  const float* lse_log2;  // [batch, num_heads_q, rows_padded]
  const float* delta;
  void* ds;           // spilled dS tiles of this chunk, see core/ds_layout.h; null: not stored
  float* dq_accum;    // [units, group, rows_padded, head_dim] while striping, else null
  float* dk_partial;  // [group_split, batch * num_heads_kv, seqlen_k, head_dim] or null
  float* dv_partial;
  int64_t ds_tiles_per_head;
  int batch, seqlen_q, seqlen_k, rows_padded, num_heads_kv, group;
  int unit_begin, units;
  int key_begin, key_end;  // keys, multiples of the key tile (key_end may be seqlen_k)
  int group_split;
  int dq_first, dq_last;  // first stripe starts dq_accum, last stripe writes dq
  int causal;
  int heads_together;  // see core/schedule.cuh
  float softmax_scale;
};

struct ReduceParams {
  const float* partial;  // [splits, batch * num_heads_kv, seqlen_k, head_dim]
  View out;              // [batch, seqlen_k, num_heads_kv, 1, head_dim]
  int splits, batch, seqlen_k, num_heads_kv;
  float scale;
};

}  // namespace flash_dist

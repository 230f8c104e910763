// How one backward call is cut into launches: a pure function of shapes, the budget and device
// properties. The order of summation, and so every bit of the result, follows from it.
#pragma once

#include <cstdint>
#include <vector>

namespace flash_dist {

struct BwdShape {
  int batch, seqlen_q, seqlen_k, num_heads_kv, group, head_dim;
  bool causal;
};

struct BwdDevice {
  int sm_count;
  int key_tile;       // keys per block of the dK/dV kernel
  int blocks_per_sm;  // resident blocks of that kernel
};

// Launches of one dK/dV grid and one dQ grid: some (batch, kv head) units, some keys.
struct BwdChunk {
  int unit_begin, units;
  int key_begin, key_end;
  bool first_stripe, last_stripe;
};

struct BwdPlan {
  bool spill = false;   // false: dQ recomputes S and dP
  int group_split = 1;  // blocks that share the query heads of one kv head
  int rows_padded = 0;  // rows of the statistics
  std::vector<BwdChunk> chunks;
  int64_t ds_tiles_per_head = 0;  // most that any chunk needs
  // bytes
  int64_t ds = 0;          // the spilled dS of one chunk
  int64_t dq_accum = 0;    // fp32 dQ while a unit is striped
  int64_t partial = 0;     // fp32 dK and dV of the group split, both together
  int64_t statistics = 0;  // lse and delta; outside the budget, always needed
  int64_t budgeted() const { return ds + dq_accum + partial; }
};

// budget: bytes for dS, dq_accum and partial together. 0 keeps to the kernels that need none of
// them.
BwdPlan plan_backward(const BwdShape& shape, const BwdDevice& device, int64_t budget);

}  // namespace flash_dist

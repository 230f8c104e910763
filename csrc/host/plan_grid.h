// Base class of the planners of a backward call. They cut keys only between key steps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ds_layout.h"
#include "host/plan.h"

namespace flash_dist {

constexpr int ROW_PADDING = 128;  // number of queries in the largest query tile
// Blocks that fill 95 % of the device count as a full wave. Filling the rest of the device would
// take more splits or fewer chunks, which cost more than they gain.
constexpr int WAVE_PERCENT = 95;
// Matrix products in a dK/dV block: S, dP, dV and dK. A block of the dQ = dS @ K kernel has one.
constexpr int64_t DKDV_PRODUCTS = 4;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded(int64_t rows) { return ceil_div(rows, ROW_PADDING) * ROW_PADDING; }

// Returns the statistics rows per head, see core/sequence.cuh. total_q: -1 if not packed.
inline int64_t statistics_rows(int total_q, int batch, int seqlen_q) {
  return padded(total_q < 0 ? seqlen_q : total_q + int64_t{ROW_PADDING} * batch);
}

class PlanGrid {
 public:
  PlanGrid(const BwdShape& shape, const BwdKernels& kernels)
      : shape_(shape),
        kernels_(kernels),
        layout_(shape.mask, shape.seqlen_q, shape.seqlen_k, shape.total_q >= 0, shape.seqlen_q),
        step_(std::max(kernels.key_tile, DS_TILE)),
        key_steps_(static_cast<int>(ceil_div(shape.seqlen_k, step_))),
        units_(int64_t{shape.batch} * shape.num_heads_kv),
        resident_(std::max<int64_t>(
            int64_t{kernels.sm_count} * kernels.blocks_per_sm / kernels.cluster, 1)),
        wave_(std::max<int64_t>(resident_ * WAVE_PERCENT / 100, 1)) {}

 protected:
  // Number of dK/dV blocks for `steps` key steps of each of `units` units.
  int64_t blocks(int64_t units, int64_t steps) const {
    return units * steps * (step_ / kernels_.key_tile);
  }

  bool fills(const BwdPlan& plan, int64_t units, int64_t steps) const {
    return blocks(units, steps) * plan.splits() >= wave_;
  }

  bool packed() const { return shape_.total_q >= 0; }
  bool even() const { return is_even(shape_.mask, packed()); }

  // True if the host knows how many dS tiles each key tile has.
  bool knows_slots() const {
    return shape_.mask.kind == MaskKind::BAND || shape_.key_slots != nullptr;
  }

  // dS tiles per query head for the key steps [begin, end).
  int64_t slots(int begin, int end) const {
    const int last = static_cast<int>(ceil_div(shape_.seqlen_k, DS_TILE));
    const int first_tile = std::min(begin * (step_ / DS_TILE), last);
    const int end_tile = std::min(end * (step_ / DS_TILE), last);
    if (shape_.mask.kind == MaskKind::BAND) return layout_.slots(first_tile, end_tile);
    return shape_.key_slots[end_tile] - shape_.key_slots[first_tile];
  }

  // Bytes of `split` partial sums of dK or dV with `columns` columns.
  int64_t partial_bytes(int64_t split, int columns) const {
    return sizeof(float) * split * units_ * shape_.seqlen_k * columns;
  }

  // First key of a step.
  int key_at(int64_t step) const {
    return static_cast<int>(std::min(step * step_, int64_t{shape_.seqlen_k}));
  }
  int query_at(int64_t tile) const {
    return static_cast<int>(std::min(tile * DS_TILE, int64_t{shape_.seqlen_q}));
  }

  // Bytes of fp32 dQ for `heads` query heads.
  int64_t dq_bytes(int64_t heads) const {
    return sizeof(float) * heads * padded(shape_.seqlen_q) * shape_.head_dim;
  }

  int members(int split) const { return shape_.group / split; }

  // A chunk with all keys and queries of some units.
  BwdChunk whole_chunk(const BwdPlan& plan, int64_t unit, int64_t units) const {
    BwdChunk chunk{};
    chunk.unit_begin = unit;
    chunk.units = units;
    chunk.key_end = shape_.seqlen_k;
    chunk.members = members(plan.group_split);
    chunk.query_end = shape_.seqlen_q;
    chunk.dq_first = chunk.dq_last = chunk.sums_first = true;
    chunk.sums_last = plan.query_split == 1;
    chunk.sum_rows = partial_rows(plan, unit);
    return chunk;
  }

  // Rows of the partial sums, ordered by group split, then query split. All chunks share them.
  SumRows partial_rows(const BwdPlan& plan, int64_t unit) const {
    const int64_t rows = units_ * shape_.seqlen_k;
    return {unit * shape_.seqlen_k, plan.query_split * rows, shape_.seqlen_k};
  }

  const BwdShape& shape_;
  const BwdKernels& kernels_;
  const DsLayout layout_;
  const int step_;  // keys per step: a chunk ends where a dS tile and a dK/dV block end
  const int key_steps_;
  const int64_t units_;     // (batch, kv head) pairs
  const int64_t resident_;  // key tiles that the device computes at a time
  const int64_t wave_;
};

}  // namespace flash_dist

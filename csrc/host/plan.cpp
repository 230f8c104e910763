#include "host/plan.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "host/chunks.h"
#include "host/plan_grid.h"
#include "host/splits.h"

namespace flash_dist {

namespace {

// Maximum number of chunks, as a multiple of the least possible number. With more chunks, each
// would be too small to fill its waves.
constexpr int64_t MOST_CHUNKS = 4;

class Planner : PlanGrid {
 public:
  Planner(const BwdShape& shape, const BwdKernels& kernels, int64_t budget)
      : PlanGrid(shape, kernels), budget_(budget), splits_(*this, budget) {}

  BwdPlan make(bool batch_invariant) const {
    BwdPlan plan;
    set_statistics(plan);
    if (!batch_invariant) {
      // Tries `wanted` splits, then more, which fill the device with smaller chunks, then fewer,
      // which leave more memory for dS.
      const int wanted = splits_.choose_group_split(true);
      for (int split = wanted; split > 0 && !plan.spill; split = splits_.next_group_split(split)) {
        try_spill(plan, split);
      }
      for (int split = wanted - 1; split > 0 && !plan.spill; --split) {
        if (shape_.group % split == 0) try_spill(plan, split);
      }
      if (!plan.spill) set_splits(plan, wanted);
    }
    if (!plan.spill) {
      plan.chunks = {whole_chunk(plan, 0, units_)};
      plan.ds_tiles_per_head = 0;
    }
    for (const BwdChunk& chunk : plan.chunks) {
      const int64_t heads = chunk.units * plan.group_split * chunk.members;
      plan.ds = std::max(plan.ds, DS_TILE_BYTES * plan.ds_tiles_per_head * heads);
    }
    list_steps(plan);
    return plan;
  }

  BwdPlan make_fused(bool batch_invariant) const {
    BwdPlan plan;
    set_statistics(plan);
    // Without keys no block would write dQ. Without queries there is no dQ.
    if (blocks(units_, key_steps_) == 0 || shape_.seqlen_q == 0) return plan;
    if (!batch_invariant) {
      plan.first_keys_first = splits_.first_keys_come_first();
      const int group_split = splits_.choose_group_split(plan.first_keys_first);
      set_splits(plan, group_split, splits_.choose_query_split(group_split));
      plan.waits = splits_.waits(plan);
    }
    int64_t at_a_time = fitting_units(budget_ - plan.dk_partial - plan.dv_partial);
    // Batch-invariant calls always use the fused kernel, even beyond the budget: whether one unit
    // fits in the budget depends on the batch and on the longest packed document.
    if (batch_invariant) at_a_time = std::max(at_a_time, ceil_div(wave_, key_steps_));
    if (at_a_time == 0) return plan;
    const int64_t count = ceil_div(units_, std::min(units_, at_a_time));
    if (!batch_invariant && count > 1 && !fills(plan, units_ / count, key_steps_)) return plan;
    cut_units(plan, count);
    const int64_t heads = ceil_div(units_, count) * shape_.group;
    plan.dq_accum = dq_bytes(heads);
    plan.dq_turns = turn_bytes(heads);
    plan.fused = true;
    list_steps(plan);
    return plan;
  }

  // One kernel, in which each block computes all gradients of a unit.
  BwdPlan make_whole() const {
    BwdPlan plan;
    plan.whole = true;
    plan.chunks = {whole_chunk(plan, 0, units_)};
    plan.steps = {{Role::BWD_WHOLE, {shape_.head_dim, shape_.head_dim_v}, 0}};
    return plan;
  }

 private:
  void set_statistics(BwdPlan& plan) const {
    const int64_t heads = int64_t{shape_.num_heads_kv} * shape_.group;
    const int64_t rows = statistics_rows(shape_.total_q, shape_.batch, shape_.seqlen_q);
    plan.rows_padded = static_cast<int>(rows);
    const int64_t arrays = shape_.normalizes ? 3 : 2;
    plan.statistics = arrays * sizeof(float) * heads * rows * (packed() ? 1 : shape_.batch);
  }

  // Lists the launches: delta, then for each chunk dK/dV and dQ (dQ first if it computes
  // normalizers) or the fused kernel, then the sums of the splits.
  void list_steps(BwdPlan& plan) const {
    const KernelSize size{shape_.head_dim, shape_.head_dim_v};
    plan.steps.push_back({Role::BWD_DELTA, {shape_.columns_v, shape_.columns_v}, 0});
    const Role dq = plan.spill ? Role::BWD_DQ_GEMM : Role::BWD_DQ_RECOMPUTE;
    for (int chunk = 0; chunk < static_cast<int>(plan.chunks.size()); ++chunk) {
      if (plan.fused) {
        plan.steps.push_back({Role::BWD_FUSED, size, chunk});
        continue;
      }
      plan.steps.push_back({Role::BWD_DKDV, size, chunk});
      plan.steps.push_back({dq, size, chunk});
      if (shape_.normalizes) std::swap(plan.steps.back(), plan.steps[plan.steps.size() - 2]);
    }
    if (plan.splits() > 1) plan.steps.push_back({Role::BWD_REDUCE, size, 0});
  }

  bool may_spill() const {
    return budget_ > 0 && kernels_.dq_rows > 0 && knows_slots() && units_ > 0 &&
           slots(0, key_steps_) > 0;
  }

  void set_splits(BwdPlan& plan, int group_split, int query_split = 1) const {
    plan.group_split = group_split;
    plan.query_split = query_split;
    const int64_t sums = plan.splits() > 1 ? plan.splits() : 0;  // 1 split: no partial sums
    plan.dk_partial = partial_bytes(sums, shape_.head_dim);
    plan.dv_partial = partial_bytes(sums, shape_.head_dim_v);
    plan.stripe_rows = query_split > 1 ? units_ * shape_.seqlen_k : 0;
  }

  // Looks for chunks whose dS fits into the budget in addition to the partial sums of `split` group
  // splits. Sets plan.spill to whether there are any.
  void try_spill(BwdPlan& plan, int split) const {
    set_splits(plan, split);
    const int64_t left = budget_ - plan.dk_partial - plan.dv_partial;
    plan.spill = may_spill() && (cut_by_units(plan, left) || cut_sequences(plan, left));
  }

  // Cuts keys, or queries and keys, whichever is cheaper. Returns false if neither is possible.
  bool cut_sequences(BwdPlan& plan, int64_t left) const {
    BwdPlan both = plan;
    const ChunkPlanner planner(*this);
    const bool cuts_both = planner.cut(both, left);
    const bool cuts_keys = cut_by_keys(plan, left);
    if (cuts_both && (!cuts_keys || planner.cost_of(both) < planner.cost_of(plan))) plan = both;
    return cuts_both || cuts_keys;
  }

  // Estimated cost of computing all units in `count` chunks, in (query, key) products: the waves of
  // dK/dV blocks plus the waves of dQ blocks. Assumes that all blocks of a kind are equally long.
  int64_t cost(int64_t count, int group_split) const {
    const auto cost_of = [&](int64_t units) {
      const int64_t dq_blocks = units * shape_.group * ceil_div(shape_.seqlen_q, kernels_.dq_rows);
      const int64_t dq_resident = int64_t{kernels_.sm_count} * kernels_.dq_blocks_per_sm;
      return DKDV_PRODUCTS * kernels_.key_tile * shape_.seqlen_q * shape_.group / group_split *
                 ceil_div(blocks(units, key_steps_) * group_split, resident_) +
             int64_t{kernels_.dq_rows} * shape_.seqlen_k * ceil_div(dq_blocks, dq_resident);
    };
    const int64_t small = units_ / count;
    const int64_t larger = units_ % count;  // number of chunks with one more unit
    return larger * cost_of(small + 1) + (count - larger) * cost_of(small);
  }

  // Returns the cheapest number of chunks, at least `fewest`: the one whose last waves are fullest.
  int64_t choose_chunks(int64_t fewest, int group_split) const {
    int64_t best = fewest;
    if (!even()) return best;  // uneven blocks balance best in large chunks
    for (int64_t count = fewest; count <= std::min<int64_t>(MOST_CHUNKS * fewest, units_);
         ++count) {
      if (cost(count, group_split) < cost(best, group_split)) best = count;
    }
    return best;
  }

  // Cuts the launches into chunks of complete units, nearly equal in size. Makes as many chunks as
  // memory requires, or more to fill complete waves. Returns false if not even one unit fits in
  // memory, or if the chunks would not fill a wave.
  bool cut_by_units(BwdPlan& plan, int64_t left) const {
    const int64_t tiles = slots(0, key_steps_);
    const int64_t tile_bytes = int64_t{DS_TILE_BYTES} * shape_.group;
    if (tiles > left / tile_bytes) return false;  // tiles * tile_bytes may overflow
    const int64_t fewest = ceil_div(units_, std::min(units_, left / (tile_bytes * tiles)));
    const int64_t count = choose_chunks(fewest, plan.group_split);
    if (count > 1 && !fills(plan, units_ / count, key_steps_)) return false;
    cut_units(plan, count);
    plan.ds_tiles_per_head = tiles;
    return true;
  }

  void cut_units(BwdPlan& plan, int64_t count) const {
    plan.chunks.clear();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = units_ * i / count;
      const int64_t end = units_ * (i + 1) / count;
      plan.chunks.push_back(whole_chunk(plan, begin, end - begin));
    }
  }

  // Bytes of the fused kernel's counters for `heads` query heads.
  int64_t turn_bytes(int64_t heads) const {
    return sizeof(int) * (1 + heads * padded(shape_.seqlen_q) / DS_TILE);
  }

  // Returns the maximum number of units whose dQ and counters fit into `left` bytes.
  int64_t fitting_units(int64_t left) const {
    const int64_t counters = turn_bytes(0);
    const int64_t unit = dq_bytes(shape_.group) + turn_bytes(shape_.group) - counters;
    return left < counters + unit ? 0 : (left - counters) / unit;
  }

  // Cuts the keys of some units into chunks with nearly equal dS. fp32 sums of dQ are kept between
  // chunks. Takes the fewest units whose key chunks fill the device. Returns false if there are
  // none.
  bool cut_by_keys(BwdPlan& plan, int64_t left) const {
    for (int64_t units = 1; units <= units_; ++units) {
      const int64_t heads = units * shape_.group;
      const int64_t accum = dq_bytes(heads);
      if (accum > left) return false;
      if (units_ % units != 0) continue;
      const std::vector<int> ends = key_chunk_ends((left - accum) / (heads * DS_TILE_BYTES));
      if (ends.empty()) return false;
      int shortest = key_steps_;
      plan.ds_tiles_per_head = 0;
      for (size_t i = 0; i < ends.size(); ++i) {
        const int begin = i == 0 ? 0 : ends[i - 1];
        shortest = std::min(shortest, ends[i] - begin);
        plan.ds_tiles_per_head = std::max(plan.ds_tiles_per_head, slots(begin, ends[i]));
      }
      if (!fills(plan, units, shortest)) continue;
      plan.dq_accum = accum;
      plan.chunks.clear();
      for (int64_t unit = 0; unit < units_; unit += units) {
        for (size_t i = 0; i < ends.size(); ++i) {
          BwdChunk chunk = whole_chunk(plan, unit, units);
          chunk.key_begin = i == 0 ? 0 : ends[i - 1] * step_;
          chunk.key_end = key_at(ends[i]);
          chunk.dq_first = i == 0;
          chunk.dq_last = i + 1 == ends.size();
          plan.chunks.push_back(chunk);
        }
      }
      return true;
    }
    return false;
  }

  // Returns the ends, in key steps, of the fewest key chunks that each have at most `limit` dS
  // slots per query head; empty if there are none.
  std::vector<int> key_chunk_ends(int64_t limit) const {
    const int64_t total = slots(0, key_steps_);
    if (limit <= 0) return {};
    for (int64_t count = std::max<int64_t>(1, ceil_div(total, limit)); count <= key_steps_;
         ++count) {
      std::vector<int> ends;
      int64_t largest = 0;
      for (int64_t i = 1; i <= count; ++i) {
        const int begin = ends.empty() ? 0 : ends.back();
        int end = begin + 1;
        while (end < key_steps_ && slots(0, end) < total * i / count) ++end;
        if (i == count) end = key_steps_;
        ends.push_back(std::min(end, key_steps_));
        largest = std::max(largest, slots(begin, ends.back()));
        if (ends.back() == key_steps_) break;
      }
      if (largest <= limit) return ends;
    }
    return {};
  }

  const int64_t budget_;
  const SplitPlanner splits_;
};

}  // namespace

bool may_store_ds(bool has_dq_gemm, int64_t budget, bool batch_invariant) {
  return has_dq_gemm && budget > 0 && !batch_invariant;
}

BwdPlan plan_backward(const BwdShape& shape, const BwdKernels& kernels, int64_t budget,
                      bool batch_invariant) {
  const Planner planner(shape, kernels, budget);
  return kernels.fused ? planner.make_fused(batch_invariant) : planner.make(batch_invariant);
}

BwdPlan plan_whole(const BwdShape& shape) { return Planner(shape, {}, 0).make_whole(); }

}  // namespace flash_dist

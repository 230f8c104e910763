#include "plan.h"

#include <algorithm>

#include "core/ds_layout.h"

namespace flash_dist {

namespace {

constexpr int ROW_PADDING = 128;  // the largest query tile

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Planner {
 public:
  Planner(const BwdShape& shape, const BwdDevice& device, int64_t budget)
      : shape_(shape),
        device_(device),
        budget_(budget),
        layout_(shape.seqlen_q, shape.seqlen_k, shape.causal),
        key_tiles_(static_cast<int>(ceil_div(shape.seqlen_k, device.key_tile))),
        units_(shape.batch * shape.num_heads_kv),
        // 0.95: a grid that fills all but a few slots is a full wave.
        wave_(static_cast<int64_t>(device.sm_count) * device.blocks_per_sm * 95 / 100) {}

  BwdPlan make() {
    BwdPlan plan;
    plan.rows_padded = static_cast<int>(ceil_div(shape_.seqlen_q, ROW_PADDING)) * ROW_PADDING;
    plan.statistics = 2 * sizeof(float) * int64_t{shape_.batch} * shape_.num_heads_kv *
                      shape_.group * plan.rows_padded;
    plan.group_split = choose_group_split();
    plan.partial = partial_bytes(plan.group_split);
    const int64_t left = budget_ - plan.partial;
    plan.spill = budget_ > 0 && (cut_by_units(plan, left) || cut_by_stripes(plan, left));
    if (!plan.spill) {
      plan.chunks = {{0, units_, 0, shape_.seqlen_k, true, true}};
      plan.ds_tiles_per_head = 0;
    }
    plan.ds = 0;
    for (const BwdChunk& chunk : plan.chunks) {
      plan.ds =
          std::max(plan.ds, DS_TILE_BYTES * plan.ds_tiles_per_head * chunk.units * shape_.group);
    }
    return plan;
  }

 private:
  int64_t partial_bytes(int split) const {
    if (split == 1) return 0;
    return 2 * sizeof(float) * int64_t{split} * units_ * shape_.seqlen_k * shape_.head_dim;
  }

  // The fewest splits that fill the device, as far as the budget holds their partial sums.
  int choose_group_split() const {
    int best = 1;
    for (int split = 1; split <= shape_.group; ++split) {
      if (shape_.group % split != 0) continue;
      if (partial_bytes(split) > budget_ / 2) break;
      best = split;
      if (int64_t{key_tiles_} * units_ * split >= wave_) break;
    }
    return best;
  }

  // Slots of dS per query head for the key tiles [begin, end) of the dK/dV kernel.
  int64_t slots(int begin, int end) const {
    const int per_tile = device_.key_tile / DS_TILE;
    const int last = static_cast<int>(ceil_div(shape_.seqlen_k, DS_TILE));
    return layout_.slots(std::min(begin * per_tile, last), std::min(end * per_tile, last));
  }

  bool fills(const BwdPlan& plan, int64_t units, int64_t tiles) const {
    return units * tiles * plan.group_split >= wave_;
  }

  // As many whole units per chunk as fit, in chunks of nearly equal size.
  bool cut_by_units(BwdPlan& plan, int64_t left) const {
    const int64_t tiles = slots(0, key_tiles_);
    const int64_t unit_bytes = DS_TILE_BYTES * tiles * shape_.group;
    if (unit_bytes > left) return false;
    const int64_t fitting = unit_bytes == 0 ? units_ : std::min<int64_t>(units_, left / unit_bytes);
    const int64_t count = ceil_div(units_, fitting);
    if (count > 1 && !fills(plan, units_ / count, key_tiles_)) return false;
    plan.chunks.clear();
    for (int64_t i = 0; i < count; ++i) {
      const int begin = static_cast<int>(units_ * i / count);
      const int end = static_cast<int>(units_ * (i + 1) / count);
      plan.chunks.push_back({begin, end - begin, 0, shape_.seqlen_k, true, true});
    }
    plan.ds_tiles_per_head = tiles;
    return true;
  }

  // Some units at a time, their keys in stripes of nearly equal dS; dQ is summed in fp32 over the
  // stripes. The fewest units whose stripes fill the device.
  bool cut_by_stripes(BwdPlan& plan, int64_t left) const {
    for (int units = 1; units <= units_; ++units) {
      const int64_t accum =
          sizeof(float) * int64_t{units} * shape_.group * plan.rows_padded * shape_.head_dim;
      if (accum > left) return false;
      const std::vector<int> ends =
          stripe_ends((left - accum) / (int64_t{units} * shape_.group * DS_TILE_BYTES));
      if (ends.empty()) return false;
      int shortest = key_tiles_;
      plan.ds_tiles_per_head = 0;
      for (size_t i = 0; i < ends.size(); ++i) {
        const int begin = i == 0 ? 0 : ends[i - 1];
        shortest = std::min(shortest, ends[i] - begin);
        plan.ds_tiles_per_head = std::max(plan.ds_tiles_per_head, slots(begin, ends[i]));
      }
      if (units_ % units != 0 || !fills(plan, units, shortest)) continue;
      plan.dq_accum = accum;
      plan.chunks.clear();
      for (int unit = 0; unit < units_; unit += units) {
        for (size_t i = 0; i < ends.size(); ++i) {
          const int begin = i == 0 ? 0 : ends[i - 1] * device_.key_tile;
          const int end = std::min(ends[i] * device_.key_tile, shape_.seqlen_k);
          plan.chunks.push_back({unit, units, begin, end, i == 0, i + 1 == ends.size()});
        }
      }
      return true;
    }
    return false;
  }

  // Ends of the fewest stripes of at most limit slots per query head; empty if a single key tile
  // has more.
  std::vector<int> stripe_ends(int64_t limit) const {
    const int64_t total = slots(0, key_tiles_);
    if (limit <= 0) return {};
    for (int64_t count = std::max<int64_t>(1, ceil_div(total, limit)); count <= key_tiles_;
         ++count) {
      std::vector<int> ends;
      int64_t largest = 0;
      for (int64_t i = 1; i <= count; ++i) {
        const int begin = ends.empty() ? 0 : ends.back();
        int end = begin + 1;
        while (end < key_tiles_ && slots(0, end) < total * i / count) ++end;
        if (i == count) end = key_tiles_;
        ends.push_back(std::min(end, key_tiles_));
        largest = std::max(largest, slots(begin, ends.back()));
        if (ends.back() == key_tiles_) break;
      }
      if (largest <= limit) return ends;
    }
    return {};
  }

  const BwdShape& shape_;
  const BwdDevice& device_;
  const int64_t budget_;
  const DsLayout layout_;
  const int key_tiles_;
  const int units_;
  const int64_t wave_;
};

}  // namespace

BwdPlan plan_backward(const BwdShape& shape, const BwdDevice& device, int64_t budget) {
  return Planner(shape, device, budget).make();
}

}  // namespace flash_dist

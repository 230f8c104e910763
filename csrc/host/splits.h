// Chooses how many dK/dV blocks share the same keys, each with some of the query heads or queries,
// and whether a fused backward starts with the first or the last keys. The rules depend on shapes
// and device properties. Their constants were measured on an H200 (benchmarks/README.md, Splits).
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/plan_grid.h"

namespace flash_dist {

// With this many waves, the load is balanced even if the lengths of the blocks are unknown.
constexpr int64_t UNEVEN_WAVES = 16;
// The delay of the last blocks, as a fraction of the longest block's time: 1 / (LATE_OF_FIRST *
// waves) if the longest blocks start first, else 1 / LATE_OF_LAST.
constexpr int64_t LATE_OF_FIRST = 8;
constexpr int64_t LATE_OF_LAST = 2;
// A larger number of splits must save more than 1 / WORTH of the cost.
constexpr int64_t WORTH = 50;
// SUM_STEPS: cost of a block's partial sums, in steps of queries. The block writes them, and
// another launch reads them. LAUNCH_STEPS: cost of that launch.
constexpr int64_t SUM_STEPS = 3;
constexpr int64_t LAUNCH_STEPS = 1;
// Query splits must save each block at least this many query tiles. Otherwise the extra launch,
// which adds the partial sums, takes at least as long as the splits save.
constexpr int64_t LEAST_SAVED = 4;
// Under a causal mask with one query head per kv head, dQ is summed from the first keys to the last
// in two cases. With at most FIRST_KEYS_WAVES waves of blocks, this order balances them. With at
// least FIRST_KEYS keys, neighbouring blocks would read Q, dO and dQ at different times if the last
// keys came first.
constexpr int64_t FIRST_KEYS_WAVES = 8;
constexpr int FIRST_KEYS = 8192;
// With more waves than this, storing dS is slower than waiting for the dQ semaphores.
constexpr int64_t WAITING_ROUNDS = 2;

class SplitPlanner : PlanGrid {
 public:
  SplitPlanner(const PlanGrid& grid, int64_t budget) : PlanGrid(grid), budget_(budget) {}

  // Returns the number of group splits. For blocks of equal length it is the least number that
  // fills the device, for blocks of unknown length the least number that makes UNEVEN_WAVES waves.
  // For blocks of known, different lengths it is the cheapest number. The partial sums must fit
  // half the budget. ascending: the blocks of the first keys start first.
  int choose_group_split(bool ascending) const {
    if (blocks(units_, key_steps_) == 0 || next_group_split(1) == 0) return 1;
    if (even()) return splits_for(wave_);
    return knows_lengths() ? cheapest_split(ascending) : splits_for(UNEVEN_WAVES * wave_);
  }

  // Returns the next larger divisor of the group; 0 if there is none, or if so many partial sums do
  // not fit in half the budget.
  int next_group_split(int split) const {
    for (++split; split <= shape_.group; ++split) {
      if (shape_.group % split == 0) return split <= most_sums() ? split : 0;
    }
    return 0;
  }

  // Returns the number of query splits: as many as the device can run at a time, limited so that
  // their partial sums fit in half the budget. Returns 1 if these splits would save too little
  // (LEAST_SAVED), for packed sequences, most of which may be short, and for lists of tiles.
  int choose_query_split(int group_split) const {
    if (packed() || shape_.mask.kind == MaskKind::TILES) return 1;
    const int64_t room = resident_ / (blocks(units_, key_steps_) * group_split);
    const int64_t tiles = ceil_div(shape_.seqlen_q, DS_TILE);
    const int64_t split = std::max<int64_t>(std::min({room, tiles, most_sums() / group_split}), 1);
    const int64_t saved = (tiles - ceil_div(tiles, split)) * members(group_split);
    return saved < LEAST_SAVED ? 1 : static_cast<int>(split);
  }

  // True if dQ is summed from the first keys to the last, which starts the longest blocks first if
  // more queries attend to the first keys than to the last. All blocks then start with the last
  // queries and wait for each other there; several query heads per kv head hide these waits. NOTE:
  // false for packed sequences: the longest length depends on the batch, and the bits of a sequence
  // must not depend on the other sequences.
  bool first_keys_come_first() const {
    if (!knows_lengths() || shape_.mask.kind == MaskKind::TILES || shape_.per_head) return false;
    if (!grows(false)) return false;
    return shape_.group > 1 || shape_.seqlen_k >= FIRST_KEYS ||
           blocks(units_, key_steps_) <= FIRST_KEYS_WAVES * resident_;
  }

  // True if waiting for the dQ semaphores takes longer than storing dS: the first query tile
  // attends to more than half of the key tiles. The blocks of these key tiles start with that query
  // tile one after the other. With more than WAITING_ROUNDS waves only the first wave waits. Up to
  // head_dim 64, waiting is always faster: storing dS takes 1.5 times as long.
  bool waits(const BwdPlan& plan) const {
    if (shape_.mask.kind != MaskKind::BAND || packed() || shape_.head_dim <= 64) return false;
    const int64_t all = blocks(units_, key_steps_) * plan.group_split;
    if (plan.query_split > 1 || all > WAITING_ROUNDS * resident_) return false;
    const int64_t tiles = ceil_div(shape_.seqlen_k, DS_TILE);
    return 2 * std::min<int64_t>(layout_.key_end(0), tiles) > tiles;
  }

 private:
  // Lengths without splits, in steps of queries: of all blocks together, and of the longest block.
  struct Lengths {
    int64_t all, longest;
  };

  // Returns the least number of splits that makes at least `wanted` blocks; if there is none, the
  // largest possible number.
  int splits_for(int64_t wanted) const {
    int best = 1;
    for (int next = 1; next > 0 && blocks(units_, key_steps_) * best < wanted;) {
      best = next;
      next = next_group_split(best);
    }
    return best;
  }

  int cheapest_split(bool ascending) const {
    const Lengths lengths = find_lengths();
    const bool longest_first = !grows(ascending);
    int best = 1;
    int64_t least = cost(lengths, best, longest_first);
    for (int split = next_group_split(1); split > 0; split = next_group_split(split)) {
      const int64_t steps = cost(lengths, split, longest_first);
      if (steps >= least - least / WORTH) continue;
      least = steps;
      best = split;
    }
    return best;
  }

  // Returns how many partial sums of dK and dV fit in half the budget.
  int64_t most_sums() const {
    return budget_ / 2 /
           std::max<int64_t>(partial_bytes(1, shape_.head_dim + shape_.head_dim_v), 1);
  }

  // True if the host knows how many query tiles attend to each key tile.
  bool knows_lengths() const { return !packed() && knows_slots(); }

  Lengths find_lengths() const {
    Lengths lengths{0, 0};
    for (int step = 0; step < key_steps_; ++step) {
      const int64_t length = ceil_div(slots(step, step + 1) * DS_TILE, step_) * shape_.group;
      lengths.all += length;
      lengths.longest = std::max(lengths.longest, length);
    }
    lengths.all *= blocks(units_, 1);
    return lengths;
  }

  // Compares the dS tiles of the two halves of the keys. True if the second half (if ascending) or
  // the first half (otherwise) has more than 1.25 times as many as the other half.
  bool grows(bool ascending) const {
    const int half = key_steps_ / 2;
    const int64_t first = slots(0, half), second = slots(key_steps_ - half, key_steps_);
    return ascending ? 4 * second > 5 * first : 4 * first > 5 * second;
  }

  // Returns the estimated cost of `split` group splits, in steps of queries: the average load plus
  // the delay of the last blocks, but at least the longest block; plus the cost of partial sums.
  int64_t cost(const Lengths& lengths, int64_t split, bool longest_first) const {
    const int64_t rounds = ceil_div(blocks(units_, key_steps_) * split, resident_);
    const int64_t longest = ceil_div(lengths.longest, split);
    const int64_t late = longest / (longest_first ? LATE_OF_FIRST * rounds : LATE_OF_LAST);
    const int64_t steps = std::max(longest, ceil_div(lengths.all, resident_) + late);
    return split == 1 ? steps : steps + SUM_STEPS * rounds + LAUNCH_STEPS;
  }

  const int64_t budget_;
};

}  // namespace flash_dist

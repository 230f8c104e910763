// How many blocks share the query heads, or the queries, of a kv head's keys, and which keys of a
// fused backward come first: rules of shapes and device properties, with constants measured
// on an H200 (benchmarks/README.md, Splits).
#pragma once

#include <algorithm>
#include <cstdint>

#include "host/plan_grid.h"

namespace flash_dist {

// Blocks of unknown lengths even out over so many waves.
constexpr int64_t UNEVEN_WAVES = 16;
// What part of the longest block the last ones end late: this one of each round where the longest
// begin first, or this one where they begin last.
constexpr int64_t LATE_OF_FIRST = 8;
constexpr int64_t LATE_OF_LAST = 2;
// More splits must save such a part.
constexpr int64_t WORTH = 50;
// What the partial sums of a block cost beside its steps of queries, in these: they are written, and
// read by another launch. And what that launch costs.
constexpr int64_t SUM_STEPS = 3;
constexpr int64_t LAUNCH_STEPS = 1;
// Blocks that share queries must save so many steps each: with fewer, the launch that adds their
// sums takes as long.
constexpr int64_t LEAST_SAVED = 4;
// Under a causal mask one query head to a kv head has the first keys first with up to so many waves
// of blocks, which it helps to even out, or from so many keys on, where with the last keys first
// neighbours come to read Q, dO and dQ at different times.
constexpr int64_t FIRST_KEYS_WAVES = 8;
constexpr int FIRST_KEYS = 8192;
// With more rounds of blocks than this, storing dS is slower than waiting for turns at dQ.
constexpr int64_t WAITING_ROUNDS = 2;

class SplitPlanner : PlanGrid {
 public:
  SplitPlanner(const PlanGrid& grid, int64_t budget) : PlanGrid(grid), budget_(budget) {}

  // The least number of splits of a group that fills the device where all blocks are equally long,
  // or makes UNEVEN_WAVES where their lengths are unknown; else the least of the least cost.
  // ascending: whether the blocks of the first keys begin first.
  int choose_group_split(bool ascending) const {
    if (blocks(units_, key_steps_) == 0 || next_group_split(1) == 0) return 1;
    if (even()) return splits_for(wave_);
    return knows_lengths() ? cheapest_split(ascending) : splits_for(UNEVEN_WAVES * wave_);
  }

  // The next larger number of splits whose partial sums half the budget holds, 0 if there is none.
  int next_group_split(int split) const {
    for (++split; split <= shape_.group; ++split) {
      if (shape_.group % split == 0) return split <= most_sums() ? split : 0;
    }
    return 0;
  }

  // As many query splits as the device has room for at a time, as far as half the budget holds
  // their partial sums. Not of packed sequences, most of which may be short, nor of lists of tiles.
  int choose_query_split(int group_split) const {
    if (packed() || shape_.mask.kind == MaskKind::TILES) return 1;
    const int64_t room = resident_ / (blocks(units_, key_steps_) * group_split);
    const int64_t tiles = ceil_div(shape_.seqlen_q, DS_TILE);
    const int64_t split = std::max<int64_t>(std::min({room, tiles, most_sums() / group_split}), 1);
    const int64_t saved = (tiles - ceil_div(tiles, split)) * members(group_split);
    return saved < LEAST_SAVED ? 1 : static_cast<int>(split);
  }

  // Whether dQ is summed from the first keys to the last: where more queries see the first ones, the
  // longest blocks then begin first, and those that end are followed by shorter ones. A group's
  // heads hide that all begin at the last queries, behind each other. NOTE: not of packed sequences,
  // whose longest is not the same in every batch, and hence not where a sequence alone must have the
  // bits of a packed one.
  bool first_keys_come_first() const {
    if (!knows_lengths() || shape_.mask.kind == MaskKind::TILES || shape_.per_head) return false;
    if (!grows(false)) return false;
    return shape_.group > 1 || shape_.seqlen_k >= FIRST_KEYS ||
           blocks(units_, key_steps_) <= FIRST_KEYS_WAVES * resident_;
  }

  // Whether blocks wait for each other's turns at dQ for longer than it takes to store dS: all blocks
  // of a head that see the first queries begin there, each behind those before it. In more rounds
  // only those of the first one do. At head_dim 64 storing takes half as long again.
  bool waits(const BwdPlan& plan) const {
    if (shape_.mask.kind != MaskKind::BAND || packed() || shape_.head_dim <= 64) return false;
    const int64_t all = blocks(units_, key_steps_) * plan.group_split;
    if (plan.query_split > 1 || all > WAITING_ROUNDS * resident_) return false;
    const int64_t tiles = ceil_div(shape_.seqlen_k, DS_TILE);
    return 2 * std::min<int64_t>(layout_.key_end(0), tiles) > tiles;
  }

 private:
  // Steps of queries of blocks of whole groups: of all of them, and of the longest.
  struct Lengths {
    int64_t all, longest;
  };

  // The least number of splits that make so many blocks, or the most that there may be.
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

  // Partial sums of each dK and dV that half the budget holds.
  int64_t most_sums() const {
    return budget_ / 2 /
           std::max<int64_t>(partial_bytes(1, shape_.head_dim + shape_.head_dim_v), 1);
  }

  // Whether the host can tell how many queries see a key tile.
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

  // Whether the second half of the keys is seen by a quarter more queries than the first, or, if not
  // ascending, the first half than the second.
  bool grows(bool ascending) const {
    const int half = key_steps_ / 2;
    const int64_t first = slots(0, half), second = slots(key_steps_ - half, key_steps_);
    return ascending ? 4 * second > 5 * first : 4 * first > 5 * second;
  }

  // How long so many splits take, in steps: all together, and as much longer as the last blocks end
  // late, but no less than the longest; then their partial sums.
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

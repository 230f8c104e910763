// Chooses into how many splits the keys of a cache are divided.
#pragma once

#include <algorithm>

namespace flash_dist {

// A third split per multiprocessor is not faster.
constexpr int SPLITS_PER_SM = 2;
// choose_splits() reduces the number of splits by less than 1 / IDLE_SPLITS.
constexpr int IDLE_SPLITS = 16;

// Returns the number of splits: one per resident block, but at most SPLITS_PER_SM per
// multiprocessor. A slightly smaller number is preferred if it divides `tiles` or is a multiple of
// `tiles`: with equally long sequences, fewer work tiles are then split and combined, and reading
// the cache takes the same time. blocks_per_sm: resident blocks per multiprocessor. tiles: the
// number of work tiles of all sequences.
inline int choose_splits(int sm_count, int blocks_per_sm, int tiles) {
  const int most = sm_count * std::min(blocks_per_sm, SPLITS_PER_SM);
  for (int splits = most; splits > most - most / IDLE_SPLITS; --splits) {
    if (tiles % splits == 0 || splits % tiles == 0) return splits;
  }
  return most;
}

}  // namespace flash_dist

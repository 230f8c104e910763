// Chooses the number of splits of the keys of a cache.
#pragma once

#include <algorithm>

namespace flash_dist {

// A third split per multiprocessor is not faster.
constexpr int SPLITS_PER_SM = 2;
// choose_splits() leaves out at most one in this many splits.
constexpr int IDLE_SPLITS = 16;

// Returns the number of splits: as many as blocks run at a time, or slightly fewer if the splits of
// equally long sequences are then complete work tiles, or equal parts of one work tile. Fewer tiles
// are then split and combined, and reading takes the same time. blocks_per_sm: resident blocks per
// multiprocessor.
inline int choose_splits(int sm_count, int blocks_per_sm, int tiles) {
  const int most = sm_count * std::min(blocks_per_sm, SPLITS_PER_SM);
  for (int splits = most; splits > most - most / IDLE_SPLITS; --splits) {
    if (tiles % splits == 0 || splits % tiles == 0) return splits;
  }
  return most;
}

}  // namespace flash_dist

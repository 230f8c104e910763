// The number of splits of the keys of caches.
#pragma once

#include <algorithm>

namespace flash_dist {

// A third split to a multiprocessor makes nothing faster.
constexpr int SPLITS_PER_SM = 2;
// One split in so many may be left out.
constexpr int IDLE_SPLITS = 16;

// As many splits as blocks run at a time, or a few less, if then the splits of equally long
// sequences are whole work tiles or equal parts of one: less is cut and combined, and reading takes
// as long. blocks_per_sm: that fit a multiprocessor.
inline int choose_splits(int sm_count, int blocks_per_sm, int tiles) {
  const int most = sm_count * std::min(blocks_per_sm, SPLITS_PER_SM);
  for (int splits = most; splits > most - most / IDLE_SPLITS; --splits) {
    if (tiles % splits == 0 || splits % tiles == 0) return splits;
  }
  return most;
}

}  // namespace flash_dist

// How many blocks share the keys of caches.
#pragma once

#include <algorithm>

namespace flash_dist {

// Of a multiprocessor: a third block brings nothing sooner.
constexpr int SPLITS_PER_SM = 2;
// The part of the splits that may be left away.
constexpr int IDLE_SPLITS = 16;

// As many as blocks run at a time, or a few less, if then the splits of equally long sequences are
// whole tiles or equal parts of one: less is cut and combined, and what is read takes as long.
// blocks_per_sm: that have room.
inline int choose_splits(int sm_count, int blocks_per_sm, int tiles) {
  const int most = sm_count * std::min(blocks_per_sm, SPLITS_PER_SM);
  for (int splits = most; splits > most - most / IDLE_SPLITS; --splits) {
    if (tiles % splits == 0 || splits % tiles == 0) return splits;
  }
  return most;
}

}  // namespace flash_dist

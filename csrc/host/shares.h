// How many blocks share the keys of caches.
#pragma once

#include <algorithm>

namespace flash_dist {

// Of a multiprocessor: a third block brings nothing sooner.
constexpr int SHARES_PER_SM = 2;
// The part of the shares that may be left away.
constexpr int IDLE_SHARES = 16;

// As many as blocks run at a time, or a few less, if then the shares of equally long sequences are
// whole tasks or equal parts of one: less is cut and folded, and what is read takes as long.
// blocks_per_sm: that have room.
inline int choose_shares(int sm_count, int blocks_per_sm, int tasks) {
  const int most = sm_count * std::min(blocks_per_sm, SHARES_PER_SM);
  for (int shares = most; shares > most - most / IDLE_SHARES; --shares) {
    if (tasks % shares == 0 || shares % tasks == 0) return shares;
  }
  return most;
}

}  // namespace flash_dist

// The part of csrc/ptx/cluster.cuh that fwd_pair uses, in the emulator. An address in another block
// has the block's rank in its upper bits.
#pragma once

#include "block.h"
#include "cuda_runtime_api.h"

namespace flash_dist {

inline int cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_sync() { emulator::synchronize_cluster(); }

constexpr int RANK_SHIFT = 24;
inline uint32_t address_in(int rank, uint32_t smem) {
  return smem | static_cast<uint32_t>(rank) << RANK_SHIFT;
}

template <class Value>
void send_remote(uint32_t smem, const Value& x, uint32_t barrier) {
  constexpr uint32_t OFFSET = (1u << RANK_SHIFT) - 1;
  const auto rank = static_cast<int>(smem >> RANK_SHIFT);
  emulator::send(rank, smem & OFFSET, &x, sizeof x, barrier & OFFSET);
}
inline void store_remote_16(uint32_t smem, uint4 x, uint32_t barrier) {
  send_remote(smem, x, barrier);
}

}  // namespace flash_dist

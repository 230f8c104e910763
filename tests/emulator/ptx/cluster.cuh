// The part of csrc/ptx/cluster.cuh that fwd_pair and bwd_halves use, in the emulator. An address in another block
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

constexpr uint32_t OFFSET = (1u << RANK_SHIFT) - 1;

template <class Value>
void send_remote(uint32_t smem, const Value& x, uint32_t barrier) {
  const auto rank = static_cast<int>(smem >> RANK_SHIFT);
  emulator::send(rank, smem & OFFSET, &x, sizeof x, barrier & OFFSET);
}
inline void store_remote_16(uint32_t smem, uint4 x, uint32_t barrier) {
  send_remote(smem, x, barrier);
}
inline uint32_t zero_behind(uint32_t, int) { return 0; }
inline void mbarrier_arrive_remote(uint32_t barrier) {
  emulator::arrive_remote(static_cast<int>(barrier >> RANK_SHIFT), barrier & OFFSET);
}

}  // namespace flash_dist

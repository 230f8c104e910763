// The grids of the kernels, and the mapping from the number of a block to its work tile.
#pragma once

#include <type_traits>

#include "core/params.h"
#include "core/schedule.cuh"
#include "ptx/registers.cuh"

namespace flash_dist {

// The query tile, head and batch entry of a block. The last query tile of a head comes first,
// because it has the most keys under a causal mask.
struct FwdBlock {
  int row0, batch, head, head_kv;
  int head_in_group;  // index of `head` among the query heads of head_kv

  __device__ __forceinline__ FwdBlock(const FwdParams& p, int block_m)
      : FwdBlock(p, block_m, fresh_block()) {}
  __device__ __forceinline__ FwdBlock(const FwdParams& p, int block_m, int number) {
    const int q_tiles = (p.seqlen_q + block_m - 1) / block_m;
    const BlockPlace place(number, p.order);
    row0 = (q_tiles - 1 - place.tile) * block_m;
    batch = divide(place.group, p.by_num_heads_q);
    head = place.group - batch * p.by_num_heads_q.divisor;
    head_kv = divide(head, p.by_group);
    head_in_group = head - head_kv * p.group;
  }
};

// Grid of the forward for blocks of block_m queries: `tiles` blocks for each of `groups` (batch
// entry, query head) pairs. Also fills in the divisors with which a block finds its tile.
struct FwdGrid {
  int64_t tiles, groups;

  FwdGrid(FwdParams& p, int block_m) {
    int64_t batch = p.batch;
    if (p.packing.cu_seqlens_q != nullptr && (p.batch == 0 || p.seqlen_q == 0)) {
      // Every row is uncovered, because no document has rows. One block per head fills them.
      batch = 1;
      p.batch = 0;
      p.seqlen_q = p.heads_together = 1;
    }
    const int64_t num_heads_q = int64_t{p.num_heads_kv} * p.group;
    tiles = (p.seqlen_q + block_m - 1) / block_m;
    groups = batch * num_heads_q;
    p.by_num_heads_q = make_divisor(num_heads_q);
    p.by_group = make_divisor(p.group);
  }
};

// Launches a grid of blocks of ROWS rows. One function serves all kernels of the same parameters,
// grid and rows per block.
template <class Params, class Grid, int ROWS>
cudaError_t launch_grid(const KernelEntry& entry, const void* params, cudaStream_t stream) {
  Params p = *static_cast<const Params*>(params);
  return launch_in_order(entry, p, Grid(p, ROWS), p, stream);
}

template <class Config>
using FwdParamsOf = std::conditional_t<Config::DROPS, FwdDropoutParams, FwdParams>;

template <class Config>
constexpr auto launch_fwd = &launch_grid<FwdParamsOf<Config>, FwdGrid, Config::BLOCK_M>;

// The key tile, (batch, kv head) pair, group split and query split of a block of the dK/dV kernel.
struct DkdvBlock {
  int key0, unit, batch, head_kv, split;
  int query_split = 0;  // index of the query split, below BwdParams::query_split

  __device__ __forceinline__ DkdvBlock(const BwdParams& p, int block_n)
      : DkdvBlock(p, block_n, fresh_block()) {}
  __device__ __forceinline__ DkdvBlock(const BwdParams& p, int block_n, int number)
      : DkdvBlock(p, block_n, BlockPlace(number, p.order)) {}
  __device__ __forceinline__ DkdvBlock(const BwdParams& p, int block_n, const BlockPlace& place) {
    key0 = p.key_begin + place.tile * block_n;
    unit = divide(place.group, p.by_group_split);
    split = place.group - unit * p.group_split;
    batch = divide(p.unit_begin + unit, p.by_num_heads_kv);
    head_kv = p.unit_begin + unit - batch * p.num_heads_kv;
  }
};

// Returns the row of the fp32 sums of dK and dV for key 0 of the block's unit and splits.
__device__ __forceinline__ int64_t first_sum_row(const BwdParams& p, const DkdvBlock& block) {
  return p.sum_rows.first + block.split * p.sum_rows.split + block.unit * p.sum_rows.unit +
         block.query_split * p.stripe_rows;
}

// True if the block writes fp32 sums instead of dK and dV, because there are other group splits,
// other query splits or later query chunks.
__device__ __forceinline__ bool keeps_sums(const BwdParams& p) {
  return p.group_split > 1 || !p.sums_last;
}

// Grid of dK/dV for blocks of block_n keys. Also fills in the divisors that DkdvBlock uses.
struct DkdvGrid {
  int64_t tiles, groups;

  DkdvGrid(BwdParams& p, int block_n)
      : tiles((p.key_end - p.key_begin + block_n - 1) / block_n),
        groups(int64_t{p.units} * p.group_split * p.query_split) {
    p.by_num_heads_kv = make_divisor(p.num_heads_kv);
    p.by_group_split = make_divisor(p.group_split);
  }
};

template <class Config>
using BwdParamsOf = std::conditional_t<Config::DROPS, BwdDropoutParams, BwdParams>;

template <class Config>
constexpr auto launch_dkdv = &launch_grid<BwdParamsOf<Config>, DkdvGrid, Config::BLOCK_N>;

// Reads the number of this block anew at each use, so that it occupies no register in between.
struct ThisBlock {
  __device__ __forceinline__ operator int() const { return fresh_block(); }
};

// The query tile and head of block `number` of the dQ kernels. The last query tile of a head comes
// first, because it has the most keys under a causal mask.
struct DqBlock {
  int row0;
  int head;  // index among the chunk's query heads, ordered by unit, then group split, then head
  int batch, head_kv, head_in_group;

  template <class Number = ThisBlock>
  __device__ __forceinline__ DqBlock(const BwdParams& p, int block_m, Number number = {}) {
    const int q_tiles = (p.seqlen_q + block_m - 1) / block_m;
    const BlockPlace place(number, p.order);
    row0 = (q_tiles - 1 - place.tile) * block_m;
    head = place.group;
    const int split_of_chunk = divide(head, p.by_members);
    const int unit_of_chunk = divide(split_of_chunk, p.by_group_split);
    const int unit = p.unit_begin + unit_of_chunk;
    const int split = split_of_chunk - unit_of_chunk * p.group_split;
    head_in_group =
        split * (p.group / p.group_split) + p.member_begin + head - split_of_chunk * p.members;
    batch = divide(unit, p.by_num_heads_kv);
    head_kv = unit - batch * p.num_heads_kv;
  }
};

// Grid of dQ for blocks of block_m queries. Also fills in the divisors that DqBlock uses.
struct DqGrid {
  int64_t tiles, groups;

  DqGrid(BwdParams& p, int block_m)
      : tiles((p.seqlen_q + block_m - 1) / block_m),
        groups(int64_t{p.units} * p.group_split * p.members) {
    p.by_num_heads_kv = make_divisor(p.num_heads_kv);
    p.by_members = make_divisor(p.members);
    p.by_group_split = make_divisor(p.group_split);
  }
};

template <class Config>
constexpr auto launch_dq = &launch_grid<BwdParamsOf<Config>, DqGrid, Config::BLOCK_M>;

}  // namespace flash_dist

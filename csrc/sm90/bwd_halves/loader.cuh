// The loading thread of a block that sums half of the columns of dK or dV.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "sm90/bwd/dkdv_steps.cuh"
#include "sm90/bwd_halves/config.h"

namespace flash_dist {

template <class Config>
struct DkdvHalvesLoader {
  using Steps = DkdvSm90Steps<Config>;
  using Cursor = DkdvCursor<Config>;
  using KTile = typename Config::KTile;
  using QTile = typename Config::QTile;

  const typename Config::Params& params;
  typename Config::Smem& smem;
  const int rank;
  typename Config::Slices slices{};
  const BwdParams& p = params.p;
  const DkdvSm90Work& work = smem.work;
  const Steps steps{params, smem};

  // Loads K or V of the block's keys, which stay in shared memory.
  __device__ __forceinline__ void load_keys() const {
    const uint32_t full = shared_address(&smem.keys_full);
    mbarrier_expect(full, Config::PANELS * KTile::BYTES);
    Steps::template load_panels<Config::PANELS, KTile::BYTES>(
        shared_address(smem.keys), params.sums_dk ? params.v : params.k,
        steps.place_of_keys(params.sums_dk ? params.v_axes : params.k_axes), full);
  }

  // Loads slices of Q, of dO and of P in the order in which the consumers read them.
  __device__ __forceinline__ void run() {
    if (work.items == 0) return;
    Cursor cursor(p, work);
    const int pairs = Config::pairs(work.items);
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      describe(2 * pair, cursor);
      describe(2 * pair + 1, cursor);
      load_first(2 * pair + rank);
      if (pair > 0) load_second(2 * pair - 2);
      if (params.sums_dk) load_weights(2 * pair + rank);
      if (pair > 0) load_second(2 * pair - 1);
    }
    load_second(2 * pairs - 2);
    load_second(2 * pairs - 1);
  }

 private:
  __device__ __forceinline__ const DkdvItem& item(int number) const {
    return smem.item[number % Config::ITEMS];
  }
  __device__ __forceinline__ void describe(int number, Cursor& cursor) const {
    DkdvItem& here = smem.item[number % Config::ITEMS];
    if (number < work.items) {
      steps.describe(here, cursor);
      cursor.next(p, work);
    } else {
      here = item(number - 1);
      here.slot[0] = here.slot[1] = -1;
    }
  }

  // Loads all columns of Q with lse, or of dO with delta.
  __device__ __forceinline__ void load_first(int number) {
    constexpr int STATISTICS = Config::BLOCK_M * sizeof(float);
    const DkdvItem& here = item(number);
    const BoxPlace at = steps.place_of_queries(params.sums_dk ? params.dout_axes : params.q_axes,
                                               here.row0, here.head_in_group);
    const int64_t statistics =
        work.statistics + static_cast<int64_t>(here.head_in_group) * p.rows_padded + here.row0;
#pragma unroll 1
    for (int i = 0; i < Config::SLICES; ++i) {
      const uint32_t full = wait_for_place(Config::SLICE_BYTES + (i == 0 ? STATISTICS : 0));
      if (i == 0) {
        load_bytes(shared_address(smem.statistics[number / 2 % Config::PAIRS]),
                   (params.sums_dk ? p.delta : p.lse_log2) + statistics, STATISTICS, full);
      }
      load_slice(params.sums_dk ? params.dout : params.q, at, i * Config::SLICE, full);
    }
  }

  // Loads this block's columns of dO, or of Q.
  __device__ __forceinline__ void load_second(int number) {
    const DkdvItem& here = item(number);
    const BoxPlace at = steps.place_of_queries(params.sums_dk ? params.q_axes : params.dout_axes,
                                               here.row0, here.head_in_group);
#pragma unroll 1
    for (int i = 0; i < Config::SUM_SLICES; ++i) {
      const uint32_t full = wait_for_place(Config::SLICE_BYTES);
      load_slice(params.sums_dk ? params.q : params.dout, at,
                 rank * Config::COLUMNS + i * Config::SLICE, full);
    }
  }

  // Loads P, which the previous launch has stored.
  __device__ __forceinline__ void load_weights(int number) {
    const DkdvItem& here = item(number);
    bool exists[2];
    for (int half = 0; half < 2; ++half) {
      exists[half] = here.slot[half] >= 0 && tile_code(p, work, here, half) != TILE_EMPTY;
    }
    const uint32_t full = wait_for_place((exists[0] + exists[1]) * DS_TILE_BYTES);
    const uint32_t place = shared_address(smem.slices[slices.stage]);
    const auto* tiles = static_cast<const uint8_t*>(p.ds);
    for (int half = 0; half < 2; ++half) {
      if (!exists[half]) continue;
      load_bytes(place + half * DS_TILE_BYTES,
                 tiles + static_cast<int64_t>(here.slot[half]) * DS_TILE_BYTES, DS_TILE_BYTES,
                 full);
    }
    slices.advance();
  }

  // Waits until the next stage is empty. Returns its full barrier, which expects `bytes` bytes.
  __device__ __forceinline__ uint32_t wait_for_place(int bytes) const {
    const uint32_t full = shared_address(&smem.full[slices.stage]);
    mbarrier_wait(shared_address(&smem.empty[slices.stage]), slices.parity ^ 1);
    mbarrier_expect(full, bytes);
    return full;
  }
  __device__ __forceinline__ void load_slice(const CUtensorMap& map, BoxPlace at, int column,
                                             uint32_t full) {
    const uint32_t place = shared_address(smem.slices[slices.stage]);
    at.column = column;
#pragma unroll
    for (int panel = 0; panel < Config::SLICE_PANELS; ++panel, at.column += QTile::COLUMNS) {
      load_box(place + panel * QTile::BYTES, map, at, full);
    }
    slices.advance();
  }
};

}  // namespace flash_dist

// A loop with a ring of shared-memory stages: while item i is computed, item i + STAGES - 1 is
// copied.
#pragma once

#include "ptx/copy.cuh"

namespace flash_dist {

// fetch(i, stage) starts the copies of item i. land(stage) stores the data that fetch() left in
// registers (before sm_80 only). compute(i, stage) uses the item. The caller must already have
// fetched and landed the data that all items use, such as Q.
template <class Target, int STAGES, class Fetch, class Land, class Compute>
__device__ __forceinline__ void run_pipeline(int items, Fetch fetch, Land land, Compute compute) {
  constexpr int AHEAD = STAGES > 1 ? STAGES - 1 : 1;
  if constexpr (Target::HAS_CP_ASYNC) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (i < items) fetch(i, i);
      cp_async_commit();
    }
    int stage = 0;
    int free_stage = AHEAD % STAGES;
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      cp_async_wait<AHEAD - 1>();
      // Item i has landed for all threads. With STAGES > 1, all have also read item i - 1.
      __syncthreads();
      if constexpr (STAGES > 1) {
        if (i + AHEAD < items) fetch(i + AHEAD, free_stage);
        cp_async_commit();
      }
      compute(i, stage);
      if constexpr (STAGES == 1) {
        __syncthreads();  // all threads have read item i
        if (i + 1 < items) fetch(i + 1, 0);
        cp_async_commit();
      }
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
    }
  } else {
    static_assert(STAGES <= 2, "registers hold one item ahead");
    if (items > 0) {
      fetch(0, 0);
      land(0);
    }
#pragma unroll 1
    for (int i = 0; i < items; ++i) {
      // Item i has landed for all threads. With two stages, all have also read item i - 1.
      __syncthreads();
      if (i + 1 < items) fetch(i + 1, (i + 1) % STAGES);
      compute(i, i % STAGES);
      if constexpr (STAGES == 1) __syncthreads();  // all threads have read item i
      if (i + 1 < items) land((i + 1) % STAGES);
    }
  }
}

}  // namespace flash_dist

// The maps by which the copy engine finds its way in the tensors of a call. They are made at each
// launch, which takes 0.1 us each, by a function of the driver that is looked for at the first.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_dist {

// The axes of a map beside columns and rows, innermost first.
struct Axes {
  int members, heads_kv, batches;
};

// By what coordinates on these axes are multiplied: 0 where all of an axis is the same memory.
struct AxisSteps {
  int member, head_kv, batch;
};

// Why there can be no map of a tensor, null if there can. The row axis of packed tensors has all
// tokens, and one batch.
const char* find_map_problem(const View& view, int rows, int columns, const Axes& axes);

// Boxes of `box_rows` rows and 64 columns, as core/panels.cuh lays them out.
cudaError_t make_map(CUtensorMap* map, AxisSteps* steps, const View& view, Dtype dtype, int rows,
                     int columns, const Axes& axes, int box_rows);

}  // namespace flash_dist

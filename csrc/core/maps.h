// The tensor maps through which TMA accesses the tensors of a call. Each launch makes new maps,
// which takes 0.1 us per map. The first launch looks up the driver function that makes maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/params.h"

namespace flash_dist {

// Sizes of the axes of a map other than columns and rows, innermost first.
struct Axes {
  int members, heads_kv, batches;
};

// Multipliers of the coordinates on these axes: 0 if all indices of an axis share the same memory.
struct AxisSteps {
  int member, head_kv, batch;
};

// Returns why a tensor cannot have a map; null if it can. Packed tensors have all tokens on the row
// axis, and one batch entry.
const char* find_map_problem(const View& view, int rows, int columns, const Axes& axes);

// Makes a map of boxes with box_rows rows and 64 columns, laid out as in core/panels.cuh.
cudaError_t make_map(CUtensorMap* map, AxisSteps* steps, const View& view, Dtype dtype, int rows,
                     int columns, const Axes& axes, int box_rows);

}  // namespace flash_dist

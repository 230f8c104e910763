// Runs host/maps.cpp with a driver that records its calls. Each input line gives "encoder rows
// columns members heads_kv batches box_rows offset" and the strides "batch row head_kv head_group"
// in elements. encoder 0: the driver lacks the function. Prints one JSON object per line.
#include <iostream>
#include <sstream>
#include <string>

#include "core/maps.h"

namespace {

bool has_encoder = true;
std::ostringstream asked;

template <class T>
void list(const char* name, const T* values, int count) {
  asked << ", \"" << name << "\": [";
  for (int i = 0; i < count; ++i) asked << (i == 0 ? "" : ", ") << values[i];
  asked << "]";
}

CUresult encode(CUtensorMap*, CUtensorMapDataType, cuuint32_t rank, void*, const cuuint64_t* sizes,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*,
                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill) {
  list("sizes", sizes, static_cast<int>(rank));
  list("strides", strides, static_cast<int>(rank) - 1);
  list("box", box, static_cast<int>(rank));
  return CUDA_SUCCESS;
}

}  // namespace

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = has_encoder ? reinterpret_cast<void*>(&encode) : nullptr;
  *result = has_encoder ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "error"; }
const char* cudaGetErrorString(cudaError_t) { return "error"; }

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream numbers(line);
    int rows, columns, box_rows;
    flash_dist::Axes axes;
    uintptr_t address;
    flash_dist::View view;
    numbers >> has_encoder >> rows >> columns >> axes.members >> axes.heads_kv >> axes.batches >>
        box_rows >> address >> view.batch >> view.row >> view.head_kv >> view.head_group;
    view.data = reinterpret_cast<void*>((uintptr_t{1} << 30) + address);
    asked.str("");
    if (const char* problem = flash_dist::find_map_problem(view, rows, columns, axes)) {
      std::cout << "{\"problem\": \"" << problem << "\"}\n";
      continue;
    }
    CUtensorMap map;
    flash_dist::AxisSteps steps;
    const cudaError_t status = flash_dist::make_map(&map, &steps, view, flash_dist::Dtype::BF16,
                                                    rows, columns, axes, box_rows);
    std::cout << "{\"status\": " << status << ", \"steps\": [" << steps.member << ", "
              << steps.head_kv << ", " << steps.batch << "]" << asked.str() << "}\n";
  }
}

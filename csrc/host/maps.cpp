#include "core/maps.h"

#include <array>
#include <cstdint>

#include "native/check.h"

namespace flash_dist {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

constexpr int BOX_COLUMNS = 64;
constexpr int64_t ELEMENT_BYTES = 2;
constexpr int64_t STRIDE_LIMIT = int64_t{1} << 40;  // in bytes

// Looks up cuTensorMapEncodeTiled at run time, because the library does not link the driver.
// Returns null if the driver lacks the function. Throws on any other failure, so that the next call
// looks it up again: falling back to other kernels would change the bits.
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &result);
#else
  const cudaError_t status =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
  check_cuda(status, "cudaGetDriverEntryPoint");
  return result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

Encode encode() {
  static const Encode found = find_encode();
  return found;
}

// An axis of a tensor map. Its size is 1 if all indices share the same memory. The stride of an
// axis of size 1 is not used.
struct Axis {
  int64_t size, stride;  // stride in elements

  Axis(int64_t size_, int64_t stride_) : size(stride_ == 0 ? 1 : size_), stride(stride_) {}

  int64_t stride_bytes() const { return stride * ELEMENT_BYTES; }
  bool fits(int columns) const {
    return size == 1 || (stride_bytes() % 16 == 0 && columns * ELEMENT_BYTES <= stride_bytes() &&
                         stride_bytes() < STRIDE_LIMIT);
  }
};

// All axes but the columns, innermost first.
std::array<Axis, 4> outer_axes(const View& view, int rows, const Axes& axes) {
  return {{{rows, view.row},
           {axes.members, view.head_group},
           {axes.heads_kv, view.head_kv},
           {axes.batches, view.batch}}};
}

}  // namespace

const char* find_map_problem(const View& view, int rows, int columns, const Axes& axes) {
  if (rows < 1 || columns < 1 || axes.members < 1 || axes.heads_kv < 1 || axes.batches < 1) {
    return "a tensor is empty";
  }
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0) {
    return "a tensor begins at no multiple of 16 bytes";
  }
  if (view.row == 0 && rows > 1) return "the rows of a tensor are all the same memory";
  for (const Axis& axis : outer_axes(view, rows, axes)) {
    if (!axis.fits(columns)) {
      return "a stride is no multiple of 16 bytes, shorter than a row or not below 2^40 bytes";
    }
  }
  if (encode() == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  return nullptr;
}

cudaError_t make_map(CUtensorMap* map, AxisSteps* steps, const View& view, Dtype dtype, int rows,
                     int columns, const Axes& axes, int box_rows) {
  const auto outer = outer_axes(view, rows, axes);
  constexpr int RANK = 5;
  cuuint64_t sizes[RANK] = {static_cast<cuuint64_t>(columns)};
  cuuint64_t strides[RANK - 1];
  const int64_t row_bytes = (columns * ELEMENT_BYTES + 15) / 16 * 16;
  for (int i = 0; i < RANK - 1; ++i) {
    sizes[i + 1] = static_cast<cuuint64_t>(outer[i].size);
    const int64_t stride = outer[i].size == 1 ? row_bytes : outer[i].stride_bytes();
    strides[i] = static_cast<cuuint64_t>(stride);
  }
  const cuuint32_t box[RANK] = {BOX_COLUMNS, static_cast<cuuint32_t>(box_rows), 1, 1, 1};
  const cuuint32_t element_strides[RANK] = {1, 1, 1, 1, 1};
  *steps = {outer[1].size > 1, outer[2].size > 1, outer[3].size > 1};
  const CUtensorMapDataType type =
      dtype == Dtype::FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const Encode function = encode();
  if (function == nullptr) return cudaErrorNotSupported;
  const CUresult result =
      function(map, type, RANK, view.data, sizes, strides, box, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flash_dist

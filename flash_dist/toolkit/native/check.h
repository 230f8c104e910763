// Errors of the host code: thrown inside the library, converted to a status and a text at the C
// interface.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

#include "product.h"

namespace KERNEL_NAMESPACE {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(text.str());
}

// Returns text such as "cudaErrorNotReady (device not ready)".
inline std::string error_text(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + " (" + cudaGetErrorString(status) + ")";
}

// If memory was not sufficient, returns the words that torch's out-of-memory errors begin with,
// because Python code searches for them. Returns an empty text for any other status.
inline const char* memory_words(cudaError_t status) {
  return status == cudaErrorMemoryAllocation ? "CUDA out of memory. " : "";
}

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that torch does not find it
  fail(memory_words(status), what, " failed with ", error_text(status));
}

}  // namespace KERNEL_NAMESPACE

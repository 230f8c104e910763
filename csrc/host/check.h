// Errors of the host code: thrown inside, turned into a status and a text at the C interface.
#pragma once

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

namespace flash_dist {

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

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not sticky: leave nothing behind for torch to find
  fail(what, " failed with ", cudaGetErrorName(status), " (", cudaGetErrorString(status), ")");
}

}  // namespace flash_dist

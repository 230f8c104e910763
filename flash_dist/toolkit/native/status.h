// Converts exceptions to the status and the per-thread text of the C interface.
#pragma once

#include <exception>
#include <string>

#include "product.h"

namespace KERNEL_NAMESPACE {

std::string& last_error();

// Returns the result of f, or -1 with last_error() set.
template <class F>
auto guarded(F&& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& error) {
    last_error() = error.what();
  } catch (...) {
    last_error() = "unknown error";
  }
  return -1;
}

}  // namespace KERNEL_NAMESPACE

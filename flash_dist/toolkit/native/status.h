// Converts exceptions to the status and the per-thread text of the C interface.
#pragma once

#include <exception>
#include <string>

#include "product.h"

namespace KERNEL_NAMESPACE {

std::string& last_error();

// Returns the result of f. If f throws, stores the message in last_error() and returns -1.
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

#pragma once

#include "options.h"

namespace flash_dist::debug {

// Runs, compares and times the kernels. Prints the results and returns the exit status.
int run(const Options& options);

}  // namespace flash_dist::debug

// attention_debug: calls the kernels from C++, for cuda-gdb, compute-sanitizer, or comparison
// without Python. See docs/debugging.md.
#include <iostream>

#include "options.h"
#include "run.h"

using namespace flash_dist::debug;

int main(int argc, char** argv) {
  try {
    const Options options = parse_options({argv + 1, argv + argc});
    if (options.help) {
      std::cout << usage();
      return 0;
    }
    if (options.parse_only) {
      std::cout << options.describe();
      return 0;
    }
    return run(options);
  } catch (const UsageError& error) {
    std::cerr << "error: " << error.what() << "\n";
    if (!error.hint.empty()) std::cerr << "\nhint: " << error.hint << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 3;
  }
}

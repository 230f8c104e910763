"""The table of a package's kernels, and the C++ files generated from it and an arch list."""

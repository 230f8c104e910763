"""The table of a package's kernels, and the C++ files that follow from it and an arch list."""

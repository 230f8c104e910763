"""Checks the parts of a package's declaration: keys, names, files, arch sets, axes, kernels."""

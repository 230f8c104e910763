"""Parts of what a package declares: keys, names, files, arch sets, axes, a table of kernels."""

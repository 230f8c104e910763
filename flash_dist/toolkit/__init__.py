"""Build, inspect and audit the CUDA kernels of any package. Nothing here depends on attention."""

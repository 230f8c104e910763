"""Builds, inspects, audits and judges the CUDA kernels of any package; knows no attention."""

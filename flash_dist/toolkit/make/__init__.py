"""Builds and publishes wheels of CUDA kernels. Wheels of projects do not contain this package."""

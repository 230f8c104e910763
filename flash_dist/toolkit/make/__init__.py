"""Builds and publishes wheels of CUDA kernels. No project's wheel has this part of the toolkit."""

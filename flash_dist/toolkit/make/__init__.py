"""Builds wheels of CUDA kernels, and publishes them. No wheel contains this part of the toolkit."""

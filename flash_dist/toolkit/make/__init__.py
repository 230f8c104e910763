"""Builds wheels of CUDA kernels, and publishes them. No wheel holds this part of the toolkit."""

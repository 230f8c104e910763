"""Reads the GPU code in any file: containers, images, kernels, stubs and differences."""

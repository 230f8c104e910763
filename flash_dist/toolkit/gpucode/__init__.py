"""The GPU code in any file: containers, images, kernels, what is real and what changed."""

"""Multi-arch CUDA attention kernels and the tools that build, inspect and prove their wheels."""

"""What compiles: host compiler, CUDA toolkits, cross compilers, torch's headers."""

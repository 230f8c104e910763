"""Finds and installs compilers: host compiler, CUDA toolkits, cross compilers, torch's headers."""

"""Finds and installs what builds need: compilers, CUDA toolkits and torch's headers."""

"""The two compiled libraries seen from Python, and the same computed on the CPU."""

"""Runs the kernels, and compares their bits between runs, with recordings and between machines."""

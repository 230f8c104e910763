"""Runs the kernels and compares bits: cases, child process, fingerprints, fleets."""

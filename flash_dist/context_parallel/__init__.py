"""Attention over a sequence that is distributed over the GPUs of a process group."""

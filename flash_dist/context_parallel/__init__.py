"""Attention over a sequence that is spread over the GPUs of a process group."""

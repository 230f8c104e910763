"""Reads package indexes, and chooses the arch set that serves the GPUs, for `select`."""

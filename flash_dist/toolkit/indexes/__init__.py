"""Reads package indexes, and chooses the set that serves the GPUs: `select`."""

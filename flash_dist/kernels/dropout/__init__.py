"""Dropout: its state, and the weights that it drops."""

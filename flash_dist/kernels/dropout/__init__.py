"""Dropout: its state, and which weights it drops."""

"""Attention to a cache of keys and values."""

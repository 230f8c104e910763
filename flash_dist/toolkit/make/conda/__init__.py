"""Conda packages and their channel."""

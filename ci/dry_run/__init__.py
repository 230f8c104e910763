"""Runs the selftest's cases without a GPU: g++ compiles the host code, and launches do nothing."""

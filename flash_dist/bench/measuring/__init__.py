"""Checks, timings and comparison of the baselines."""

"""Checks dropout_p, and computes which weights a call dropped."""

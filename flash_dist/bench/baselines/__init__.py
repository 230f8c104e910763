"""Attention functions to measure, and the problems."""

"""Checks the dropout of a call, and returns the weights that a call dropped."""

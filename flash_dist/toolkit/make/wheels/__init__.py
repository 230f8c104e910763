"""Processes a built wheel: repair, tags, checks, reading and comparison."""

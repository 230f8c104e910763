"""How a run of a baseline is tried out, timed and compared."""

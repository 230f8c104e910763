"""How a run of a contender is tried out, timed and compared."""

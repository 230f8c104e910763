"""Cases of the selftest: inputs, and the values that they must give."""

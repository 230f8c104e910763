"""Cases of the selftest: inputs and expected values."""

"""What the selftest computes: cases, their inputs, and the values that they must give."""

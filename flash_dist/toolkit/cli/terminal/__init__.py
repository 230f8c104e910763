"""Output on a terminal or in a pipe, and signals."""

"""Rules that torch needs for operators besides kernels: FLOP counts, and sharding."""

"""Rules that torch needs for operators, in addition to kernels: FLOP counts, and sharding."""

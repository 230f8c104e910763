"""What an index offers, and which of it serves these GPUs: `select`."""

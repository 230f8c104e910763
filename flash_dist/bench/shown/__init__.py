"""Output of `bench`: progress, tables and sentences."""

"""The attention functions and problems to measure."""

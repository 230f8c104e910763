"""How things look on a terminal."""

"""Where GPU code lies in a file: containers, what registers them, and cubins in none."""

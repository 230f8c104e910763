"""Who is measured, and on which problems."""

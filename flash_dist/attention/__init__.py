"""The functions that users call, and what they check before the operators are called."""

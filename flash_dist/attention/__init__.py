"""The functions that users call, and their checks of arguments."""

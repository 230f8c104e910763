"""Dropout of a call, checked, and which weights it dropped."""

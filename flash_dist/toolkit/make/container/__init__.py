"""Builds the same wheels as `building`, but in a manylinux container."""

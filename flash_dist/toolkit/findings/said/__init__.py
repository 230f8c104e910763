"""Entries that explain messages of other programs. Our checks report few of these causes."""

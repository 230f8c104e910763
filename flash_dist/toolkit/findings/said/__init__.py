"""Entries that explain messages of others, which our checks do not report, or rarely."""

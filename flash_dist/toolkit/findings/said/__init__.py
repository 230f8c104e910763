"""Entries that explain messages of others, which no check of ours reports, or hardly one."""

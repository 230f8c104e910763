"""Runs checks and the selftest on a machine, and judges builds in files or at addresses."""

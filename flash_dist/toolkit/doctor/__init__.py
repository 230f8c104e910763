"""Runs checks and selftest on a machine, a build, or the target of an address."""

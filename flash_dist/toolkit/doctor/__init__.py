"""Runs checks and selftest on a machine, a build, or a build at an address."""

"""Checks of a release, for the commands `audit` and `verify`."""

"""Builds a wheel on this machine: the PEP 517 backend, plans, sets, sources."""

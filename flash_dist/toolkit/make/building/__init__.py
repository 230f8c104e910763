"""Builds wheels and sdists on this machine: the PEP 517 backend, plans, packing."""

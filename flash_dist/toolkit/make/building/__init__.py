"""From a request to a wheel on this machine: the PEP 517 backend, plans, sets, sources."""

"""Puts checks and proof together: examines a machine, a build, or what an address names."""

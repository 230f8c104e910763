"""Readers of untrusted bytes: archives, ELF, PE, JSON, C++ names. They decode no GPU code."""

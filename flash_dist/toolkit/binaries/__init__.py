"""Bytes that nobody trusts: files, archives, ELF and PE, names; nothing here knows of GPUs."""

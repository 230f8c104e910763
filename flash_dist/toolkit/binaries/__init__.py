"""Readers of untrusted bytes: files, archives, ELF, PE and names. They know nothing of GPUs."""

"""Describes this machine: driver, GPUs, the loader's path, torch, the installed build."""

"""Describe in one sentence why a baseline does not run."""

from __future__ import annotations

import re
from typing import Final

import torch

_LONGEST: Final = 200
_FATAL: Final = ("illegal memory access", "unspecified launch failure", "device-side assert")


class CannotRun(Exception):  # noqa: N818 - an unsupported problem is not an error
    """A baseline is not installed, or does not support the problem."""


def describe_failure(error: BaseException) -> str:
    """Return one line that says why a baseline failed."""
    if isinstance(error, CannotRun):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        wanted = re.search(r"Tried to allocate ([0-9.]+ \w+)", str(error))
        return f"out of memory (tried to allocate {wanted[1]})" if wanted else "out of memory"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return f"{type(error).__name__}: {text[:_LONGEST]}"


def is_fatal(error: BaseException) -> bool:
    """Return whether the error leaves the CUDA context unusable.

    torch appends advice on device-side assertions to every CUDA error, so the line with that
    advice is ignored.
    """
    said = [line for line in str(error).splitlines() if "TORCH_USE_CUDA_DSA" not in line]
    return any(phrase in line for line in said for phrase in _FATAL)

"""No memory: the kernels and operators say so in words, torch has an exception for it."""

from __future__ import annotations

from typing import Final

import torch

OUT_OF_MEMORY: Final = "CUDA out of memory."  # how torch begins, and csrc/host/check.h


def raise_out_of_memory(error: Exception) -> None:
    """Raise torch.OutOfMemoryError in the words of an error that says so; return from any other.

    The compiled parts see torch through its stable ABI, which makes a RuntimeError of whatever they
    throw; before torch 2.13 it puts the place in our sources in front.
    """
    _, words, rest = str(error).partition(OUT_OF_MEMORY)
    if words and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(words + rest) from None

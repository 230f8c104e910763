"""No memory: the kernels and operators say so in words, torch has an exception for it."""

from __future__ import annotations

from typing import Final

import torch

OUT_OF_MEMORY: Final = "CUDA out of memory."  # how torch begins, and csrc/host/check.h


def raise_out_of_memory(error: Exception) -> None:
    """Raise torch.OutOfMemoryError in the words of an error that says so; return from any other.

    The compiled parts see torch through its stable ABI, which makes a RuntimeError of whatever they
    throw.
    """
    text = str(error)
    if text.startswith(OUT_OF_MEMORY) and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(text) from None

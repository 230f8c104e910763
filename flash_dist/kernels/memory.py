"""Out-of-memory errors, and warnings about memory that a graph would copy.

The extension reports exhausted memory only in an error's text; `raise_out_of_memory` raises torch's
exception for it. If one operator writes to two inputs of a graph that share memory, Inductor copies
all of this memory in every call, and copies the result back. Inputs in separate allocations are
written in place, and so are two views that the graph itself makes of one input.
"""

from __future__ import annotations

import sys
import warnings
from functools import cache
from typing import Any, Final

import torch

Tensor = torch.Tensor

OUT_OF_MEMORY: Final = "CUDA out of memory."  # text of torch's error, and of toolkit/native/check.h


def raise_out_of_memory(error: Exception) -> None:
    """Raise torch.OutOfMemoryError if an error's message says that memory ran out; else return.

    torch's stable ABI turns any exception of the extension into a RuntimeError. Before torch 2.13,
    the message of this error starts with a position in our C++ sources.
    """
    _, words, rest = str(error).partition(OUT_OF_MEMORY)
    if words and not isinstance(error, torch.OutOfMemoryError):
        raise torch.OutOfMemoryError(words + rest) from None


def warn_of_copies(k_cache: Tensor, v_cache: Tensor) -> None:
    """Warn once if k_cache and v_cache are inputs of a traced graph and share one allocation."""
    if _is_input(k_cache) and _address(k_cache) == _address(v_cache):
        _warn()


def _address(x: Tensor) -> int:
    """Return the identity of a tensor's memory, also for fake tensors."""
    address: int = x.untyped_storage()._cdata  # noqa: SLF001 - as torch's own StorageWeakRef
    return address


def _is_input(x: Tensor) -> bool:
    """Return whether a tensor is an input of the graph that Dynamo traces."""
    dynamo: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        inputs = dynamo.InstructionTranslator.current_tx().output.tracked_fakes
    except AttributeError:  # Dynamo is not tracing, or torch renamed an attribute
        return False
    return any(one.fake is x for one in inputs)


@cache
def _warn() -> None:
    message = (
        "flash_attn_with_kvcache is compiled with k_cache and v_cache that are views of one "
        "allocation: torch.compile copies all of it in every call\n\nhint: allocate k_cache and "
        "v_cache on their own, or pass the one tensor and cut it inside the compiled function"
    )
    warnings.warn(message, stacklevel=2)

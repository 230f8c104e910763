"""Casts of a call on a cache under autocast."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import autocast
from ..layouts import dtype_name

Tensor = torch.Tensor


def cast_call(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, *others: Tensor | None
) -> tuple[Any, ...]:
    """Cast what is read, as for every function under autocast; a cache that is written stays.

    Args:
        q: Queries.
        k_cache: A copy is returned where it has another dtype.
        v_cache: Likewise.
        k: New keys, None where nothing is written.
        others: New values and angles.

    Raises:
        TypeError: New keys are to be written into a cache of another dtype.
    """
    if k is None:
        return autocast(q, k_cache, v_cache, k, *others)
    q, k, *rest = autocast(q, k, *others)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if isinstance(x, torch.Tensor) and isinstance(q, torch.Tensor) and x.dtype != q.dtype:
            message = (
                f"{name} must be {dtype_name(q.dtype)} where new keys are written under autocast, "
                f"got {dtype_name(x.dtype)}\n\nhint: `{name}.to(torch.{dtype_name(q.dtype)})`, once"
            )
            raise TypeError(message)
    return q, k_cache, v_cache, k, *rest

"""Functions that flash-attention 3's cache tests import, as calls of flash_dist.compat.

compat has the names of version 2. Version 3 renames some arguments, and adds a few.
"""

from __future__ import annotations

from typing import Any

import torch

from flash_dist.compat import flash_attn

Tensor = torch.Tensor


def flash_attn_with_kvcache(  # noqa: PLR0913 - flash-attention's signature
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    **others: Any,  # noqa: ANN401 - as they are
) -> Any:  # noqa: ANN401 - out, or out and lse
    """Call with the names of version 2, without arguments that are None."""
    if rotary_seqlens is not None and rotary_seqlens is not cache_seqlens:
        others["rotary_seqlens"] = rotary_seqlens  # our function refuses it
    given = {"cache_seqlens": cache_seqlens, "block_table": page_table, **others}
    named = {name: value for name, value in given.items() if value is not None}
    return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **named)


def get_scheduler_metadata(*_: object, **__: object) -> None:
    """Return nothing: calls need no schedule."""

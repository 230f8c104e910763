"""Chooses which queries of a rank attend to which keys of another rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import FlashDistError
from ..masks.band import Band

if TYPE_CHECKING:
    from .exchange import Ring

Tensor = torch.Tensor
ALL = slice(None)


@dataclass(frozen=True)
class Part:
    """A rank's work with the keys of one rank: the ranges of queries and keys, and the mask."""

    rows: slice
    keys: slice
    mask: Band


def choose_parts(ring: Ring, seqlen: int, *, causal: bool) -> list[Part]:
    """Return the work of this rank in each step of the ring.

    Args:
        ring: The ranks.
        seqlen: Keys per rank.
        causal: Each token attends only to itself and earlier tokens.
    """
    sources = [ring.find_source(step) for step in range(ring.size)]
    return [choose_part(ring.rank, source, seqlen, causal=causal) for source in sources]


def choose_part(rank: int, source: int, seqlen: int, *, causal: bool) -> Part:
    """Return which queries of `rank` attend to which keys of `source`.

    Args:
        rank: The rank with the queries.
        source: The rank with the keys.
        seqlen: Tokens per rank; if causal, two chunks in zigzag order.
        causal: Each token attends only to itself and earlier tokens.
    """
    half = seqlen // 2
    if not causal:
        return Part(ALL, ALL, Band())
    if source == rank:
        return Part(ALL, ALL, Band(right=0))
    if source < rank:  # only chunk 0 of source is before rank
        return Part(ALL, slice(0, half), Band())
    return Part(slice(half, None), ALL, Band())  # only chunk 1 of rank is after source


def require_one_loss(*gradients: Tensor | None) -> None:
    """Raise FlashDistError if gradients belong to many losses, as with `is_grads_batched`."""
    if any(x is not None and _is_batched(x) for x in gradients):
        message = "ring_attention has gradients of one loss at a time, got is_grads_batched"
        raise FlashDistError(message, hint="call `torch.autograd.grad` once for each loss")


def _is_batched(x: Tensor) -> bool:
    """Return whether a gradient is batched over losses, by the vmap of `is_grads_batched`."""
    return "Batched" in torch._C._dispatch_key_set(x)  # noqa: SLF001 - no public function

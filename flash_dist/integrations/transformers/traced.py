"""The mask function and attention in a graph of torch.compile.

A graph holds tensors and numbers, but no objects. A mask of a graph is two tensors: numbers on the
host, and where sequences begin, on the device. Operators make them when the graph runs, by the code
for eager calls, and read what they are made of: that waits for the GPU, once a forward, and cannot
be captured as a CUDA graph.

A mask function is neither read nor evaluated for every pair here. A few pairs for each query tell
where sequences begin; the others of them must be seen as a band within these shows them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from ...masks import Band
from .refusals import refuse_tracing
from .sight import Sight

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

NAMESPACE: Final = "flash_dist_transformers"  # of the operators, see graph.py

_operators: Final[Any] = getattr(torch.ops, NAMESPACE)


def trace_mask(  # noqa: PLR0913, PLR0917 - a call
    mask_function: Callable[..., Any],
    tokens: Tensor | None,
    sizes: tuple[int, int, int],
    position: int | Tensor,
    offset: int | Tensor,
    device: torch.device | str,
    **others: Any,  # noqa: ANN401
) -> Sight | Tensor:
    """Return the mask of a forward that is traced.

    Args:
        mask_function: As `make_mask` has it.
        tokens: [batch, keys or less], which keys exist.
        sizes: Sequences, queries and keys.
        position: Of the first query.
        offset: Of the first query from the first key.
        device: Where the queries are.
        others: As `make_mask` has them.
    """
    batch, queries, keys = sizes
    band = _find_band(queries == keys, **others)
    moved, known = (offset, 0) if isinstance(offset, torch.Tensor) else (None, offset)
    device = torch.device(device)
    if queries == 1:
        seen: Tensor = _operators.see_once(
            tokens, moved, known, batch, keys, band.left, band.right, device
        )
        return seen
    steps, probes = [], None
    if queries == keys:
        steps = _list_steps(band)
        probes = _probe(mask_function, batch, position, queries, steps, device)
    graph = _operators.see(
        tokens, probes, steps, None, moved, known, batch, queries, keys, band.left, band.right
    )
    is_chunked = _is_chunked(others.get("local_size"), others.get("config"))
    return Sight(band, packed=tokens is None and not is_chunked, graph=graph)


def trace_documents(sight: Sight, positions: Tensor, batch: int) -> Sight:
    """Return what is seen within the documents of position_ids [batch or 1, seqlen]."""
    seqlen = positions.shape[1]
    if sight.graph is not None:
        return replace(sight, graph=_operators.split(*sight.graph, positions, batch))
    sizes = batch, seqlen, seqlen, sight.band.left, sight.band.right
    return replace(sight, graph=_operators.see(None, None, [], positions, None, 0, *sizes))


def _find_band(  # noqa: PLR0913 - what transformers says of a mask
    is_square: bool,  # noqa: FBT001
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    config: object = None,
    **_: object,
) -> Band:
    """Return the band that a kind of mask is named for."""
    is_chunked = _is_chunked(local_size, config)
    is_whole = allow_is_bidirectional_skip is not None
    if use_vmap or not (is_square or is_whole or (allow_is_causal_skip and not is_chunked)):
        refuse_tracing()
    if is_whole:
        return Band() if local_size is None else Band(local_size, local_size)
    return Band(right=0) if local_size is None else Band(local_size - 1, 0)


def _is_chunked(size: int | None, config: object) -> bool:
    """Whether a size is that of chunks, which no cu_seq_lens tell of."""
    return size is not None and size == getattr(config, "attention_chunk_size", None)


def _list_steps(band: Band) -> list[int]:
    """Return how far from a query keys are that tell a mask: the one before, and those at edges."""
    steps = [-1]
    if band.left >= 0:
        steps += [-band.left, -band.left - 1]
    if band.right >= 0:
        steps += [band.right, band.right + 1]
    return steps


def _probe(  # noqa: PLR0913, PLR0917 - a call
    mask_function: Callable[..., Any],
    batch: int,
    position: int | Tensor,
    seqlen: int,
    steps: list[int],
    device: torch.device,
) -> Tensor:
    """Return whether queries see the keys at some steps from them, [steps, batch, seqlen]."""
    row = torch.arange(batch, device=device).unsqueeze(1)
    head = torch.zeros_like(row)
    numbers = torch.arange(seqlen, device=device).unsqueeze(0)
    seen = [
        mask_function(
            row, head, numbers + position, (numbers + step).clamp(0, seqlen - 1) + position
        )
        for step in steps
    ]
    return torch.stack([x.expand(batch, seqlen) for x in seen])

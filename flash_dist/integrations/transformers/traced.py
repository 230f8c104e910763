"""The mask function in a graph of torch.compile: key intervals, as tensors of the graph.

Nothing is read on the host. The device computes each query's first key and end from two inputs: the
tokens that exist, and the positions where documents begin. IntervalMask makes a plan from these
bounds, also on the device.

The mask function is neither recognised nor evaluated for every pair. Evaluating it for each query
and the key before it finds where sequences begin. Some other pairs must agree with a band within
the sequences. When the graph runs, it checks this, and also that padding has no gaps. If a check
fails, torch stops at an assertion, after which the process cannot use a GPU any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import pad

from ...masks import Band, IntervalMask
from ...masks.plan import MAX_INDEX
from .host import Padding
from .layer_mask import LayerMask, find_restarts
from .refusals import UNTRACEABLE, refuse_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]  # first key and end, [batch or 1, queries]

_BEFORE: Final = -1  # offset of the key before a query, which is masked where a sequence starts


def trace_mask(
    mask_function: Callable[..., Any],
    tokens: Tensor | None,
    sizes: tuple[int, int, int],
    first: tuple[int | Tensor, int | Tensor],
    *,
    device: torch.device | str,
    **others: Any,  # noqa: ANN401
) -> LayerMask | Tensor:
    """Return the mask of a forward pass, as tensors of the graph that is being traced.

    Args:
        mask_function: As in `make_mask`.
        tokens: [batch, at most keys], False for padding; later keys are padding, too. None: no
            padding.
        sizes: Numbers of sequences, queries and keys.
        first: Position of the first query, twice: counted from the start of the sequence, and from
            the first key.
        device: The device of the queries.
        others: As in `make_mask`.
    """
    (batch, queries, keys), (position, offset) = sizes, first
    band = _find_band(queries == keys, **others)
    visible = _follow(band, torch.arange(queries, device=device).unsqueeze(0) + offset, keys)
    if tokens is not None:
        padding = Padding.of(pad(tokens.to(device, torch.bool), (0, keys - tokens.shape[1])))
        torch._assert_async(~padding.has_gaps(), UNTRACEABLE)  # noqa: SLF001 - no public name
        visible = _join(visible, (padding.first.unsqueeze(1), padding.end.unsqueeze(1)))
    if queries == 1:
        lo, hi = (x.expand(batch, 1) for x in visible)
        return torch.stack([lo, torch.maximum(lo, hi)], -1).to(torch.int32).view(batch, 1, 2, 1)
    if queries == keys:
        starts = _find_starts(mask_function, band, (batch, queries), position, device)
        visible = _join(visible, _spread(starts))
    is_chunked = _is_chunked(others.get("local_size"), others.get("config"))
    is_packed = tokens is None and not is_chunked
    return LayerMask(band, packed=is_packed, graph=visible, sizes=(queries, keys))


def plan_traced(
    layer_mask: LayerMask, documents: Tensor | None, queries: int, keys: int, device: torch.device
) -> IntervalMask:
    """Return the mask of a call in a graph. Layers with the same `documents` share it.

    Args:
        layer_mask: Made by the mask function.
        documents: position_ids [batch or 1, seqlen], which restart in each document; None if
            they do not separate documents.
        queries: Number of queries.
        keys: Number of keys.
        device: The device of the queries.
    """
    for known, mask in layer_mask.planned:
        if known is documents:
            return mask
    visible = layer_mask.graph
    if visible is None:
        visible = _follow(layer_mask.band, torch.arange(queries, device=device).unsqueeze(0), keys)
    if documents is not None:
        visible = _join(visible, _spread(find_restarts(documents)))
    causal = queries == keys and layer_mask.band.right == 0  # so top left and bottom right agree
    mask = IntervalMask.of(*visible, seqlen_k=keys, causal=causal)
    layer_mask.planned.append((documents, mask))
    return mask


def _follow(band: Band, rows: Tensor, keys: int) -> Pair:
    """Return the first key and the end of the band for each query.

    `rows` are the queries' positions, counted from key 0.
    """
    lo = rows - band.left if band.left >= 0 else torch.zeros_like(rows)
    hi = rows + band.right + 1 if band.right >= 0 else torch.zeros_like(rows) + keys
    return lo, hi


def _join(one: Pair, other: Pair) -> Pair:
    """Return the intersection of two intervals for each query."""
    return torch.maximum(one[0], other[0]), torch.minimum(one[1], other[1])


def _spread(starts: Tensor) -> Pair:
    """Return the first token and the end of each token's sequence, given where sequences begin."""
    numbers = torch.arange(starts.shape[1], device=starts.device)
    first = torch.where(starts, numbers, 0).cummax(1).values
    ends = pad(starts[:, 1:], (0, 1), value=True)
    end = torch.where(ends, numbers + 1, MAX_INDEX).flip(1).cummin(1).values.flip(1)
    return first, end


def _find_band(
    is_square: bool,  # noqa: FBT001
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    config: object = None,
    **others: object,
) -> Band:
    """Return the band implied by the arguments that transformers passes to the mask function."""
    is_whole = others.get("allow_is_bidirectional_skip") is not None
    is_causal = others.get("allow_is_causal_skip", True) and not _is_chunked(local_size, config)
    if use_vmap or not (is_square or is_whole or is_causal):
        refuse_tracing()
    if is_whole:
        return Band() if local_size is None else Band(local_size, local_size)
    return Band(right=0) if local_size is None else Band(local_size - 1, 0)


def _is_chunked(size: int | None, config: object) -> bool:
    """Return whether a size is the model's chunk size; cu_seq_lens do not describe chunks."""
    return size is not None and size == getattr(config, "attention_chunk_size", None)


def _find_starts(
    mask_function: Callable[..., Any],
    band: Band,
    sizes: tuple[int, int],
    position: int | Tensor,
    device: torch.device | str,
) -> Tensor:
    """Return booleans [batch, seqlen], True where a sequence begins; check the band's edges."""
    batch, seqlen = sizes
    row = torch.arange(batch, device=device).unsqueeze(1)
    head = torch.zeros_like(row)
    numbers = torch.arange(seqlen, device=device).unsqueeze(0)

    def probe(keys: Tensor) -> Tensor:
        visible: Tensor = mask_function(row, head, numbers + position, keys + position)
        return visible.expand(batch, seqlen)

    starts = ~probe((numbers + _BEFORE).clamp(min=0)) | (numbers == 0)
    ids = starts.cumsum(1)
    for step in _list_edges(band):
        keys = (numbers + step).clamp(0, seqlen - 1)
        exists = keys == numbers + step
        in_band = (band.left < 0 or step >= -band.left) and (band.right < 0 or step <= band.right)
        right = (ids == ids.gather(1, keys.expand(batch, seqlen))) & in_band
        torch._assert_async(  # noqa: SLF001
            (~exists | (probe(keys) == right)).all(), UNTRACEABLE
        )
    return starts


def _list_edges(band: Band) -> list[int]:
    """Return the offsets from a query to the keys at the edges of a band, and just outside."""
    edges = []
    if band.left >= 0:
        edges += [-band.left, -band.left - 1]
    if band.right >= 0:
        edges += [band.right, band.right + 1]
    return edges

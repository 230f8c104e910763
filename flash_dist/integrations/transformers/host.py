"""Computes on the host which keys are visible to the queries of a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

from ...masks import BlockMask
from .layer_mask import LayerMask, Segments, send

if TYPE_CHECKING:
    from ...masks import Band

Tensor = torch.Tensor


class Padding(NamedTuple):
    """Padding of the keys; on the host, except in a graph."""

    exists: Tensor  # booleans [batch, seqlen_k], False for padding
    first: Tensor  # [batch], first key that is not padding; 0 if all keys are padding
    end: Tensor  # [batch], last key that is not padding, plus 1; 0 if all keys are padding

    @classmethod
    def of(cls, exists: Tensor) -> Padding:
        """Return the padding for `exists`; compute `first` and `end`."""
        keys = torch.arange(exists.shape[1], device=exists.device)
        end = torch.where(exists, keys + 1, 0).amax(1)
        first = torch.where(exists, keys, exists.shape[1]).amin(1)
        return cls(exists, torch.minimum(first, end), end)

    def has_gaps(self) -> Tensor:
        """Return, as a tensor, whether any row has padding between other keys."""
        return (self.exists.sum(1) != self.end - self.first).any()


def read_padding(tokens: Tensor | None, keys: int) -> Padding | None:
    """Return the padding of the keys; None without padding. Waits for the GPU.

    Args:
        tokens: [batch, at most keys], 0 or False for padding; None: no padding. If there is
            padding, keys past the last token are padding, too.
        keys: Number of keys.
    """
    if tokens is None:
        return None
    exists = tokens.to("cpu", torch.bool)
    if bool(exists.all()):
        return None
    return Padding.of(pad(exists, (0, keys - exists.shape[1])))


def find_changes(ids: Tensor) -> Tensor:
    """Return booleans [batch, seqlen], True where an id differs from the one before in its row."""
    return pad(ids[:, 1:] != ids[:, :-1], (1, 0))


def has_parts(ids: Tensor) -> bool:
    """Return whether an id occurs again after other ids: its tokens are then in several parts."""
    return bool((find_changes(ids).sum(1) != find_changes(ids.sort(1).values).sum(1)).any())


def see_once(
    band: Band,
    padding: Padding | None,
    offset: int | Tensor,
    keys: int,
    device: torch.device | str,
) -> Tensor | None:
    """Return the visible keys of a single query, int32 [batch or 1, 1, 2, 1]: first key and end.

    Return None if `offset` is an int and all keys are visible.

    Args:
        band: The mask, in positions counted from key 0.
        padding: Padding of the keys.
        offset: Position of the query, counted from key 0.
        keys: Number of keys.
        device: The device of the result.
    """
    everything = torch.tensor([[0, keys]], device="cpu")
    bounds = everything
    if padding is not None:
        bounds = torch.stack([padding.first, padding.end], -1)
    lo, hi = (bounds if isinstance(offset, int) else send(bounds, device)).unbind(-1)
    if band.left >= 0:
        lo = torch.clamp(lo, min=offset - band.left)
    if band.right >= 0:
        hi = torch.clamp(hi, max=offset + band.right + 1)
    visible = torch.stack([lo, torch.maximum(lo, hi)], -1)
    if isinstance(offset, int):
        if bool((visible == everything).all()):
            return None
        visible = send(visible, device)
    return visible.to(torch.int32).view(-1, 1, 2, 1)


def see(band: Band, padding: Padding | None, offset: int, queries: int, keys: int) -> LayerMask:
    """Return the mask of several queries. The first one is `offset` positions after key 0."""
    end = offset + queries
    exist = end if band.right == 0 and end < keys else None  # the filled part of a static cache
    used = keys if exist is None else exist
    if padding is not None and bool(padding.exists[:, :used].all()):
        padding = None
    # NOTE: under a full mask, queries and keys may be different tokens, as in cross-attention.
    if padding is not None and used == queries and offset == 0 and not band.is_full:
        segments = Segments(find_changes(padding.exists[:, :used]))
        return LayerMask(band, segments, keys=exist, sizes=(queries, keys))
    aligned = used - queries == offset
    if padding is None and (aligned or band.is_full):
        return LayerMask(band, keys=exist, sizes=(queries, keys))
    rows = torch.arange(offset, end, device="cpu")
    first = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    last = torch.full((1, 1), used, device="cpu")
    if padding is not None:
        first, last = padding.first.unsqueeze(1), padding.end.unsqueeze(1)
    lo = first if band.left < 0 else torch.maximum(first, rows - band.left)
    hi = last if band.right < 0 else torch.minimum(last, rows + band.right + 1)
    lo, hi = (x.clamp(0, used).expand(-1, queries) for x in (lo, hi))
    mask = BlockMask.from_intervals(lo, hi, seqlen_k=used)
    return LayerMask(keys=exist, mask=mask, sizes=(queries, keys))

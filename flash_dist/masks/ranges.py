"""Ranges of keys visible to a tile of queries, or to all queries of a batch entry."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .bits import WORD, strips, unpack
from .layout import TILE

Tensor = torch.Tensor

BEYOND = 1 << 31  # greater than any key


def to_tiles(x: Tensor) -> Tensor:
    """Return [..., tiles, TILE] of [..., rows]; rows that do not exist are 0."""
    padded = pad(x, (0, -x.shape[-1] % TILE))
    tiles: Tensor = padded.unflatten(-1, (-1, TILE))
    return tiles


def query_ranges(lo: Tensor, hi: Tensor) -> Tensor:
    """Return [..., query tiles, 4]: least and greatest lo, least and greatest hi.

    Of the rows that see a key; with a row that sees none, greatest lo and least hi are 0, so that
    no tile looks full.
    """
    exists = to_tiles(torch.ones(lo.shape[-1], dtype=torch.bool, device=lo.device))
    lo, hi = to_tiles(lo), to_tiles(hi)
    visible = lo < hi
    some, every = visible.any(-1), (visible | ~exists).all(-1)
    ranges = (
        torch.where(some, torch.where(visible, lo, BEYOND).amin(-1), 0),
        torch.where(every, lo.amax(-1), 0),
        torch.where(every, torch.where(exists, hi, BEYOND).amin(-1), 0),
        hi.amax(-1),
    )
    return torch.stack(ranges, -1)


def bounds_of_intervals(lo: Tensor, hi: Tensor) -> Tensor:
    """Return [batch, 2]: first and end key that some query of some head sees, (0, 0) if none does.

    Args:
        lo: [batch, heads, seqlen_q].
        hi: Likewise.
    """
    visible = lo < hi
    first = torch.where(visible, lo, BEYOND).flatten(1).amin(1)
    end = torch.where(visible, hi, 0).flatten(1).amax(1)
    return torch.stack([torch.where(end > 0, first, 0), end], -1)


def bounds_of_keys(visible: Tensor) -> Tensor:
    """Return the same of words [batch, words] of the keys that some query of some head sees."""
    keys = torch.arange(WORD * visible.shape[1], device="cpu")
    return bounds_of_intervals(keys, keys + unpack(visible, len(keys)))  # an interval for each key


def key_ranges(ranges: Tensor, seqlen_k: int) -> Tensor:
    """Return [batch, heads, key tiles, 2]: first and end query tile that may see a key tile.

    Args:
        ranges: [batch, heads, query tiles, 4], as `query_ranges` says.
        seqlen_k: Keys.
    """
    batch, heads, query_tiles, _ = ranges.shape
    key_tiles = -(-seqlen_k // TILE)
    begin = (ranges[..., 0] // TILE).to(torch.int32).unsqueeze(-1)
    until = (-(-ranges[..., 3] // TILE)).to(torch.int32).unsqueeze(-1)
    first = torch.full((batch, heads, key_tiles), query_tiles, dtype=torch.int32, device="cpu")
    end = torch.zeros((batch, heads, key_tiles), dtype=torch.int32, device="cpu")
    n = torch.arange(key_tiles, dtype=torch.int32, device="cpu")
    for part in strips(ranges.shape[:3], key_tiles):
        visible = (begin[part] <= n) & (n < until[part])
        m = torch.arange(part[2].start, part[2].stop, dtype=torch.int32, device="cpu").unsqueeze(-1)
        plane = part[:2]
        first[plane] = torch.minimum(first[plane], torch.where(visible, m, query_tiles).amin(2))
        end[plane] = torch.maximum(end[plane], torch.where(visible, m + 1, 0).amax(2))
    return torch.stack([torch.where(first < end, first, 0), end], -1)

"""Ranges of keys that a tile of queries, or all queries of a batch entry, attend to."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.functional import pad

from .bits import WORD, unpack
from .layout import TILE

Tensor = torch.Tensor

BEYOND: Final = 1 << 31  # larger than any key
PAIRS_AT_ONCE: Final = 1 << 20  # most pairs of tiles to compare at once, in at most 8 MiB
MOST_PAIRS: Final = 1 << 24  # with more pairs, _key_ranges_by_size is faster


def to_tiles(x: Tensor) -> Tensor:
    """Return [..., rows] as [..., tiles, TILE]: a view, or a copy if the last tile is padded.

    The padding is 0.
    """
    missing = -x.shape[-1] % TILE
    padded = pad(x, (0, missing)) if missing else x  # pad would copy
    tiles: Tensor = padded.unflatten(-1, (-1, TILE))
    return tiles


def query_ranges(lo: Tensor, hi: Tensor) -> Tensor:
    """Return [..., query tiles, 4]: min and max of lo, then min and max of hi.

    Rows without a visible key have no effect on min of lo and max of hi. If a tile has such a row,
    max of lo and min of hi are 0, so that the tile does not count as full.
    """
    rows = lo.shape[-1]
    lo, hi = to_tiles(lo), to_tiles(hi)
    visible = lo < hi
    some, counted, ends = visible.any(-1), visible, hi
    if rows % TILE:  # rows that do not exist do not count
        exists = to_tiles(torch.ones(rows, dtype=torch.bool, device=lo.device))
        counted, ends = visible | ~exists, torch.where(exists, hi, BEYOND)
    every = counted.all(-1)
    ranges = (
        torch.where(visible, lo, BEYOND).amin(-1) * some,
        lo.amax(-1) * every,
        ends.amin(-1) * every,
        hi.amax(-1),
    )
    return torch.stack(ranges, -1)


def bounds_of_intervals(lo: Tensor, hi: Tensor) -> Tensor:
    """Return [batch, 2]: first key and end of the keys that any query of any head attends to.

    Without a visible key they are (0, 0).

    Args:
        lo: [batch, heads, seqlen_q].
        hi: Likewise.
    """
    visible = lo < hi
    first = torch.where(visible, lo, BEYOND).flatten(1).amin(1)
    end = torch.where(visible, hi, 0).flatten(1).amax(1)
    return torch.stack([first * (end > 0), end], -1)


def bounds_of_keys(visible: Tensor) -> Tensor:
    """Return the result of `bounds_of_intervals` from words [batch, words] of visible keys."""
    keys = torch.arange(WORD * visible.shape[1], device="cpu")
    return bounds_of_intervals(keys, keys + unpack(visible, len(keys)))  # one interval per key


def key_ranges(ranges: Tensor, seqlen_k: int) -> Tensor:
    """Return [batch, heads, key tiles, 2]: first and end query tile that may attend to a key tile.

    Args:
        ranges: [batch, heads, query tiles, 4], made by `query_ranges`, on any device.
        seqlen_k: Number of keys.
    """
    begin, end = ranges[..., 0] // TILE, -(-ranges[..., 3] // TILE)
    key_tiles = -(-seqlen_k // TILE)
    is_small = begin.numel() * key_tiles <= MOST_PAIRS
    find = _key_ranges_by_pair if is_small else _key_ranges_by_size
    first, last = find(begin, end, key_tiles)
    return torch.stack([first * (first < last), last], -1).to(torch.int32)


def _key_ranges_by_pair(begin: Tensor, end: Tensor, key_tiles: int) -> tuple[Tensor, Tensor]:
    """Return first and end query tile [..., key tiles], given the key tiles of each query tile.

    This compares every query tile with every key tile: few kernel launches, but memory for about
    PAIRS_AT_ONCE pairs.
    """
    query_tiles, planes = begin.shape[2], begin.shape[:2]
    n = torch.arange(key_tiles, dtype=torch.int32, device=begin.device)
    first = n.new_full((*planes, key_tiles), query_tiles)
    last = torch.zeros_like(first)
    at_once = max(PAIRS_AT_ONCE // max(first.numel(), 1), 1)
    for start in range(0, query_tiles, at_once):
        end_m = min(start + at_once, query_tiles)
        m = torch.arange(start, end_m, dtype=torch.int32, device=begin.device).unsqueeze(-1)
        from_n, to_n = (x[..., start:end_m, None] for x in (begin, end))
        visible = (from_n <= n) & (n < to_n)  # [..., some query tiles, key tiles]
        first = torch.minimum(first, torch.where(visible, m, query_tiles).amin(2))
        last = torch.maximum(last, ((m + 1) * visible).amax(2))
    return first, last


def _key_ranges_by_size(begin: Tensor, end: Tensor, key_tiles: int) -> tuple[Tensor, Tensor]:
    """Return what `_key_ranges_by_pair` returns, with less memory but more kernel launches.

    The memory is proportional to the number of tiles of one axis. Each power of 2 takes a few
    launches.

    Two runs, which may overlap, cover the key tiles of a query tile. Each is as long as the largest
    power of 2 that fits. The loop begins with the longest runs. In each step, entry n is the first
    (or the end) of the query tiles that have a run of length `size` from key tile n on. For the
    next step, each run is split into halves, which begin at n and n + size / 2.
    """
    query_tiles, length = begin.shape[2], (end - begin).clamp(min=0)
    m = torch.arange(query_tiles, device=begin.device).expand_as(begin)
    first = begin.new_full((*begin.shape[:2], key_tiles), query_tiles)
    last = torch.zeros_like(first)
    for size in (1 << bit for bit in reversed(range(key_tiles.bit_length()))):
        first[..., size:] = torch.minimum(first[..., size:], first[..., :-size])
        last[..., size:] = torch.maximum(last[..., size:], last[..., :-size])
        here = (length >= size) & (length < 2 * size)
        for n in (begin, end - size):
            place = torch.where(here, n, 0)
            first.scatter_reduce_(-1, place, torch.where(here, m, query_tiles), "amin")
            last.scatter_reduce_(-1, place, torch.where(here, m + 1, 0), "amax")
    return first, last

"""Makes the plan of a mask from its terms: key intervals of queries, or lists of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

from .layout import ROWS, TILE, TILES
from .plan import MaskPlan, pack_plan, require_index
from .ranges import bounds_of_intervals, bounds_of_keys, key_ranges, query_ranges, to_tiles
from .tiles import (
    VisibleTiles,
    count_interval_tiles,
    list_interval_tiles,
    list_tiles,
    make_lists,
    slots_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .inputs import Shape
    from .terms import Intervals, Term

Tensor = torch.Tensor

LEAST_USE: Final = 0.9  # if a smaller fraction of the tiles in key_ranges is visible, use lists


def make_plan(terms: Sequence[Term], shape: Shape) -> MaskPlan:
    """Return the plan of a mask. `shape` has 1 for batch or heads if all of them share the mask."""
    rows, others = split_terms(terms, shape)
    if not others:
        return _plan_rows(rows, shape)
    tiles, found, visible = list_tiles(others, rows, shape)
    if found is not None:
        return _plan_rows(found, shape)
    arrays = {"bits": tiles.bits} | _key_bounds(bounds_of_keys(visible), shape)
    return _plan_tiles(tiles, shape, arrays)


def split_terms(terms: Sequence[Term], shape: Shape) -> tuple[Intervals, list[Term]]:
    """Return lo and hi, which contain all visible keys, and the terms without intervals.

    If all terms have intervals, the mask is exactly lo and hi.
    """
    split = [(term, term.intervals(shape)) for term in terms]
    others = [term for term, found in split if found is None]
    bounds = [found or term.hull(shape) for term, found in split]
    return _intersect([found for found in bounds if found is not None], shape), others


def _key_bounds(bounds: Tensor, shape: Shape) -> dict[str, Tensor]:
    """Return {"key_bounds": bounds}; an empty dict if the bounds contain every key."""
    all_keys = (bounds[:, 0] == 0) & (bounds[:, 1] == shape.seqlen_k)
    return {} if bool(all_keys.all()) else {"key_bounds": bounds}


def _intersect(intervals: Sequence[Intervals], shape: Shape) -> Intervals:
    """Return the intersection, lo and hi [batch, heads, seqlen_q]. It is (0, 0) if empty."""
    lo = torch.zeros(1, 1, 1, dtype=torch.int64, device="cpu")
    hi = torch.full((1, 1, 1), shape.seqlen_k, device="cpu")
    for more_lo, more_hi in intervals:
        lo, hi = torch.maximum(lo, more_lo), torch.minimum(hi, more_hi)
    visible = lo < hi
    lo, hi = torch.where(visible, lo, 0), torch.where(visible, hi, 0)
    return lo.expand(shape[:3]).contiguous(), hi.expand(shape[:3]).contiguous()


def _plan_rows(intervals: Intervals, shape: Shape) -> MaskPlan:
    ranges = query_ranges(*intervals)
    spans = key_ranges(ranges, shape.seqlen_k)
    lengths = spans[..., 1] - spans[..., 0]
    arrays = _key_bounds(bounds_of_intervals(*intervals), shape)
    arrays["rows"] = torch.stack([to_tiles(x).flatten(-2) for x in intervals], -1)
    visible = count_interval_tiles(intervals, shape)
    if visible < LEAST_USE * int(lengths.sum()):
        return _plan_tiles(list_interval_tiles(intervals, ranges, shape), shape, arrays)
    key_slots = pad(lengths.amax((0, 1)).cumsum(0), (1, 0))
    require_index(int(key_slots[-1]))
    arrays |= {"query_ranges": ranges, "key_ranges": spans, "key_slots": key_slots}
    return pack_plan(ROWS, shape, arrays)


def _plan_tiles(tiles: VisibleTiles, shape: Shape, arrays: dict[str, Tensor]) -> MaskPlan:
    """Return a plan with lists of tiles, in addition to the given arrays."""
    planes = shape.batch * shape.num_heads_q
    query_tiles, key_tiles = (-(-size // TILE) for size in shape[2:])
    key_slots, slots = slots_of(tiles, planes, query_tiles, key_tiles)
    require_index(int(key_slots[-1]))
    lists = make_lists(tiles, slots, planes, query_tiles, key_tiles)
    return pack_plan(TILES, shape, {**arrays, "key_slots": key_slots, **lists})

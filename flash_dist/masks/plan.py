"""Plan of a mask for the kernels: int32 arrays in one buffer, and their offsets.

A tile is TILE queries by TILE keys. A plane is one pair of batch entry and head. The leading axes
[batches, heads] of an array are 1 if the mask does not differ along them. An end is exclusive. The
backward stores dS of a tile in a slot. The arrays fill MaskParams of csrc/core/params.h; layout.py
describes how.

    key_bounds    [batches, 2] first and end key that any query attends to
    rows          [batches, heads, query_tiles * TILE, 2] first and end key of a query
    query_ranges  [batches, heads, query_tiles, 4] least and greatest first key, least and greatest
                  end key of the queries of a tile
    key_ranges    [batches, heads, key_tiles, 2] first and end query tile
    key_slots     [key_tiles + 1] number of dS slots before each key tile, in each plane
    by_query_...  two TileLists, with lines of 64 and of 128 queries, see tiles.py
    by_key_...    likewise for lines of keys
    bits          [index, TILE, 2] visible keys of each query of a tile, low word first
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from .inputs import complain
from .layout import ABSENT, ALIGNMENT, ARRAYS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .inputs import Shape

Tensor = torch.Tensor

MAX_INDEX: Final = 2**31 - 1


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """A mask for calls of one shape, on the CPU. Do not write to its tensors."""

    kind: int  # ROWS or TILES
    batches: int  # the call's batch, or 1 if all entries have the same mask
    heads: int  # the call's num_heads_q, or 1
    seqlen_q: int
    seqlen_k: int
    arrays: dict[str, Tensor]  # views of `packed`, by name in ARRAYS; without absent arrays
    packed: Tensor  # [:] int32, all arrays
    layout: list[int]  # integers for the operators, see layout.py
    numbers: Tensor  # `layout` as a tensor, [:] int64

    @property
    def key_slots(self) -> Tensor:
        """The number of dS slots before each key tile, from which the host plans the backward."""
        return self.arrays["key_slots"]

    def digest(self) -> str:
        """Return a hash of the sizes and arrays, independent of the offsets in the buffer."""
        told = [
            [
                name.rsplit("_", 1) if name.startswith("by_") else [name],  # [list, array]
                list(array.shape),
                hashlib.sha256(array.numpy().tobytes()).hexdigest(),
            ]
            for name, array in self.arrays.items()
        ]
        sizes = (self.kind, self.batches, self.heads, self.seqlen_q, self.seqlen_k)
        return hashlib.sha256(json.dumps([sizes, told]).encode()).hexdigest()


def pack_plan(kind: int, shape: Shape, arrays: Mapping[str, Tensor]) -> MaskPlan:
    """Copy the arrays into one buffer, and return the plan."""
    offsets, end = lay_out({name: array.numel() for name, array in arrays.items()})
    require_index(end)
    # The padding at the end gives even an empty last array a valid address.
    packed = torch.zeros(end + ALIGNMENT, dtype=torch.int32, device="cpu")
    views = {}
    for name, begin in offsets.items():
        if begin != ABSENT:
            array = arrays[name]
            views[name] = packed[begin : begin + array.numel()].view(array.shape).copy_(array)
    layout = [kind, *shape, *offsets.values()]
    numbers = torch.tensor(layout, dtype=torch.int64, device="cpu")
    return MaskPlan(kind, *shape, views, packed, layout, numbers)


def lay_out(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the offset of each of ARRAYS in one buffer, and the buffer's size, in int32 values.

    An array that `sizes` does not contain has the offset ABSENT.
    """
    offsets, end = dict.fromkeys(ARRAYS, ABSENT), 0
    for name in ARRAYS:
        if name in sizes:
            offsets[name] = end
            end += sizes[name] + -sizes[name] % ALIGNMENT
    return offsets, end


def require_index(count: int) -> None:
    """Raise ValueError if a count exceeds what kernels can index."""
    if count > MAX_INDEX:
        raise complain(
            ValueError,
            f"the plan of a mask must have at most {MAX_INDEX} numbers and tiles, got {count}",
            "a mask of fewer heads or batch entries is smaller: an axis of 1 fits any number",
        )

"""Plan of a mask for the kernels: int32 arrays in one buffer, and where each begins.

Pairs of TILE queries and TILE keys are tiles. The arrays of the leading axes [batches, heads] have
1 there where a mask does not differ. They fill MaskParams of csrc/core/params.h; layout.py says how
they get there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from .inputs import complain
from .layout import ABSENT, ALIGNMENT, ARRAYS, LINES, TILE

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor

MAX_INDEX: Final = 2**31 - 1


class TileList(NamedTuple):
    """Visible tiles in compressed rows: those of line i are [begin[i], begin[i + 1]), ascending.

    A line is 64 or 128 queries (then tiles are of keys), or keys (then tiles are of queries).
    """

    begin: Tensor  # [batches * heads * lines + 1]
    # [:, 4] tile on the other axis, code of the first 64, of the second 64; then 0, of lines of 128
    # keys 2 * how many later lines have the entry's tile, plus 1 if no earlier one does
    entries: Tensor
    slots: Tensor  # [:, 2] where the two tiles' dS lies, or ABSENT


class Arrays(NamedTuple):
    """The arrays of a mask. All int32; None: absent."""

    key_bounds: Tensor | None  # [batches, 2] first and end key that any query sees
    rows: Tensor | None  # [batches, heads, query_tiles * TILE, 2] first and end key of a query
    query_ranges: Tensor | None  # [batches, heads, query_tiles, 4] least and greatest first key,
    # least and greatest end key of the queries of a tile
    key_ranges: Tensor | None  # [batches, heads, key_tiles, 2] first and end query tile
    key_slots: Tensor  # [key_tiles + 1] slots of dS before each key tile, in any plane
    by_query: tuple[TileList, TileList] | None = None  # lines of 64 and of 128 queries
    by_key: tuple[TileList, TileList] | None = None  # lines of 64 and of 128 keys
    bits: Tensor | None = None  # [index, TILE, 2] keys that a query sees, low word first

    def present(self) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Yield those that there are: each with its name, or with its list's and its own."""
        for name, value in self._asdict().items():
            if isinstance(value, tuple):
                for lines, one in zip(LINES, value, strict=True):
                    for field, array in one._asdict().items():
                        yield (f"{name}_{lines * TILE}", field), array
            elif value is not None:
                yield (name,), value

    def named(self) -> dict[str, Tensor | None]:
        """Return all of them by their names in the layout."""
        return dict.fromkeys(ARRAYS) | {"_".join(names): array for names, array in self.present()}


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """A mask for calls of one shape, on the CPU. Do not write to its tensors."""

    kind: int  # ROWS or TILES
    batches: int  # the call's batch, or 1 if all entries have the same mask
    heads: int  # the call's num_heads_q, or 1
    seqlen_q: int
    seqlen_k: int
    arrays: Arrays
    packed: Tensor  # [:] int32, all arrays
    layout: list[int]  # the operators' list of integers, see layout.py
    numbers: Tensor  # [:] int64, the same

    @property
    def key_slots(self) -> Tensor:
        """The slots of dS before each key tile, which the host plans the backward with."""
        return self.arrays.key_slots

    def digest(self) -> str:
        """Return a hash of the sizes and the arrays; where these lie in the buffer is no matter."""
        told = [
            [list(names), list(array.shape), hashlib.sha256(array.numpy().tobytes()).hexdigest()]
            for names, array in self.arrays.present()
        ]
        sizes = (self.kind, self.batches, self.heads, self.seqlen_q, self.seqlen_k)
        return hashlib.sha256(json.dumps([sizes, told]).encode()).hexdigest()


def pack_plan(
    kind: int, planes: tuple[int, int], seqlens: tuple[int, int], arrays: Arrays
) -> MaskPlan:
    """Return the plan with its arrays in one buffer, which `MaskPlan.arrays` are views of."""
    buffer = _Buffer(list(arrays.named().values()))
    views = Arrays(
        buffer.move_any(arrays.key_bounds),
        buffer.move_any(arrays.rows),
        buffer.move_any(arrays.query_ranges),
        buffer.move_any(arrays.key_ranges),
        buffer.move(arrays.key_slots),
        buffer.move_lists(arrays.by_query),
        buffer.move_lists(arrays.by_key),
        buffer.move_any(arrays.bits),
    )
    offsets = [
        ABSENT if view is None else int(view.storage_offset()) for view in views.named().values()
    ]
    layout = [kind, *planes, *seqlens, *offsets]
    numbers = torch.tensor(layout, dtype=torch.int64, device="cpu")
    return MaskPlan(kind, *planes, *seqlens, views, buffer.packed, layout, numbers)


class _Buffer:
    """Memory that arrays move into, one after the other."""

    def __init__(self, arrays: list[Tensor | None]) -> None:
        size = sum(_aligned(x.numel()) for x in arrays if x is not None)
        require_index(size)
        # an empty array has an address, too
        self.packed = torch.zeros(size + ALIGNMENT, dtype=torch.int32, device="cpu")
        self._end = 0

    def move(self, array: Tensor) -> Tensor:
        view = self.packed[self._end : self._end + array.numel()].view(array.shape)
        self._end += _aligned(array.numel())
        return view.copy_(array)

    def move_any(self, array: Tensor | None) -> Tensor | None:
        return None if array is None else self.move(array)

    def move_lists(
        self, lists: tuple[TileList, TileList] | None
    ) -> tuple[TileList, TileList] | None:
        if lists is None:
            return None
        first, second = (TileList(*map(self.move, one)) for one in lists)
        return first, second


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def require_index(count: int) -> None:
    """Raise ValueError if kernels could not count something of a mask."""
    if count > MAX_INDEX:
        raise complain(
            ValueError,
            f"the plan of a mask must have at most {MAX_INDEX} numbers and tiles, got {count}",
            "a mask of fewer heads or batch entries is smaller: an axis of 1 fits any number",
        )

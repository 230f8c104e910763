"""Reads a mask's plan as kernels do: from one buffer of int32 and a list of integers.

It follows the description of the arrays, tile by tile, and shares no code with the planner.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final, Literal

import torch

Tensor = torch.Tensor
Axis = Literal["query", "key"]

TILE: Final = 64
NAMES: Final = ("key_bounds", "rows", "query_ranges", "key_ranges", "key_slots")
LISTS: Final = ("query64", "query128", "key64", "key128")


@dataclass(frozen=True)
class Visit:
    """A tile that a kernel processes."""

    m: int
    n: int
    full: bool  # no mask needed
    seen: Tensor  # [TILE, TILE] booleans
    slot: int  # dS slot


class Reader:
    """One plane (batch entry, head) of a mask, as a kernel sees it."""

    def __init__(self, packed: Tensor, layout: list[int], batch: int = 0, head: int = 0) -> None:
        assert packed.dtype == torch.int32
        assert packed.dim() == 1
        assert len(layout) == 23
        self.packed = packed
        self.kind, self.batches, self.heads, self.seqlen_q, self.seqlen_k = layout[:5]
        offsets = layout[5:]
        assert all(offset == -1 or offset % 4 == 0 for offset in offsets)
        self.at = dict(zip(NAMES, offsets[:5], strict=True))
        self.lists = dict(
            zip(LISTS, zip(*(offsets[5 + i : 17 : 3] for i in range(3)), strict=True), strict=True)
        )
        self.bits = offsets[17]
        self.batch = batch if self.batches > 1 else 0
        self.plane = self.batch * self.heads + (head if self.heads > 1 else 0)
        self.query_tiles, self.key_tiles = (-(-x // TILE) for x in (self.seqlen_q, self.seqlen_k))

    def ints(self, offset: int, index: int, width: int) -> list[int]:
        """Return the `index`-th group of `width` numbers of an array."""
        first = offset + index * width
        assert offset >= 0
        assert first + width <= len(self.packed)
        return self.packed[first : first + width].tolist()

    def key_bounds(self) -> tuple[int, int]:
        if self.at["key_bounds"] < 0:
            return 0, self.seqlen_k
        first, end = self.ints(self.at["key_bounds"], self.batch, 2)
        return first, end

    def key_slots(self) -> list[int]:
        first = self.at["key_slots"]
        return self.packed[first : first + self.key_tiles + 1].tolist()

    def visits(self, axis: Axis, group: int) -> list[Visit]:
        """Return the tiles in the order of a kernel whose blocks own `group` tiles of an axis."""
        if self.kind == 2:
            return self._listed(axis, group)
        return self._ranged(axis, group)

    def seen(self, visits: list[Visit]) -> Tensor:
        """Return booleans [seqlen_q, seqlen_k] of the visited tiles; check that none repeats."""
        whole = torch.zeros(self.query_tiles * TILE, self.key_tiles * TILE, dtype=torch.bool)
        done = set()
        for visit in visits:
            assert (visit.m, visit.n) not in done
            done.add((visit.m, visit.n))
            rows, columns = visit.m * TILE, visit.n * TILE
            whole[rows : rows + TILE, columns : columns + TILE] = visit.seen
        return whole[: self.seqlen_q, : self.seqlen_k]

    # Intervals

    def _ranged(self, axis: Axis, group: int) -> list[Visit]:
        owned, others = self.query_tiles, self.key_tiles
        if axis == "key":
            owned, others = others, owned
        found = []
        for first in range(0, owned, group):
            for other in range(others):
                for own in range(first, min(first + group, owned)):
                    m, n = (own, other) if axis == "query" else (other, own)
                    if axis == "key":
                        begin, end = self._key_range(n)
                        if not begin <= m < end:
                            continue
                    if self._in_range(m, n):
                        found.append(self._ranged_visit(m, n))
        return found

    def _query_range(self, m: int) -> list[int]:
        return self.ints(self.at["query_ranges"], self.plane * self.query_tiles + m, 4)

    def _key_range(self, n: int) -> list[int]:
        return self.ints(self.at["key_ranges"], self.plane * self.key_tiles + n, 2)

    def _in_range(self, m: int, n: int) -> bool:
        least_lo, _, _, most_hi = self._query_range(m)
        return least_lo < TILE * (n + 1) and most_hi > TILE * n

    def _ranged_visit(self, m: int, n: int) -> Visit:
        _, most_lo, least_hi, _ = self._query_range(m)
        full = most_lo <= TILE * n and least_hi >= TILE * (n + 1)
        begin, end = self._key_range(n)
        assert begin <= m < end
        slot = self.key_slots()[n] + m - begin
        assert slot < self.key_slots()[n + 1]
        return Visit(m, n, full, self._everything(m) if full else self._by_rows(m, n), slot)

    def _by_rows(self, m: int, n: int) -> Tensor:
        assert self.at["rows"] >= 0
        first = self.at["rows"] + (self.plane * self.query_tiles + m) * TILE * 2
        rows = self.packed[first : first + TILE * 2].view(TILE, 2)
        keys = torch.arange(TILE * n, TILE * (n + 1))
        return (rows[:, :1] <= keys) & (keys < rows[:, 1:])

    def _everything(self, m: int) -> Tensor:
        exists = torch.arange(TILE * m, TILE * (m + 1)) < self.seqlen_q
        return exists.unsqueeze(1).expand(TILE, TILE)

    # Lists

    def _listed(self, axis: Axis, group: int) -> list[Visit]:
        begin, entries, slots = self.lists[f"{axis}{TILE * group}"]
        tiles = self.query_tiles if axis == "query" else self.key_tiles
        lines, found = -(-tiles // group), []
        turns: defaultdict[int, list[int]] = defaultdict(list)
        for line in range(lines):
            first, end = self.ints(begin, self.plane * lines + line, 1) + self.ints(
                begin, self.plane * lines + line + 1, 1
            )
            before = -1
            for index in range(first, end):
                other, *codes, turn = self.ints(entries, index, 4)
                turns[other].append(turn)
                assert other > before
                before = other
                assert codes != [-2, -2]
                assert group == 2 or codes[1] == -2
                places = self.ints(slots, index, 2)
                for half, (code, slot) in enumerate(zip(codes, places, strict=True)):
                    own = line * group + half
                    assert (code == -2) == (slot == -1)
                    if code != -2:
                        m, n = (own, other) if axis == "query" else (other, own)
                        assert m < self.query_tiles
                        assert n < self.key_tiles
                        found.append(self._listed_visit(m, n, code, slot))
        for given in turns.values():  # lines with this tile, first to last
            after = range(len(given))[::-1]
            last = [2 * n + (n == len(given) - 1) for n in after]
            assert given == (last if (axis, group) == ("key", 2) else [0] * len(given))
        return found

    def _listed_visit(self, m: int, n: int, code: int, slot: int) -> Visit:
        assert self.key_slots()[n] <= slot < self.key_slots()[n + 1]
        assert code >= -3
        if code == -1:
            assert TILE * (n + 1) <= self.seqlen_k
            return Visit(m, n, full=True, seen=self._everything(m), slot=slot)
        if code == -3:
            return Visit(m, n, full=False, seen=self._by_rows(m, n), slot=slot)
        first = self.bits + code * TILE * 2
        words = self.packed[first : first + TILE * 2].view(TILE, 2, 1)
        assert self.bits >= 0
        seen = (words >> torch.arange(32) & 1).bool().flatten(1)
        return Visit(m, n, full=False, seen=seen, slot=slot)

"""Plans of which keys ranks exchange, made from the smallest `first_key` of every few queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import torch
from torch.nn.functional import pad

from ..masks.intervals import IntervalMask

if TYPE_CHECKING:
    from .exchange import Gathered, Ring

Tensor = torch.Tensor
ByStep = dict[int, slice]

ROWS: Final = 128  # queries that share a smallest first_key
# A range of keys begins at a multiple of this, which is one of most kernels' key blocks: so a
# kernel sums the same blocks as with all keys.
KEYS: Final = 384
NEVER: Final = 1 << 52  # beyond all tokens; pad takes a float


@dataclass(frozen=True)
class Plan:
    """A rank's share of the exchange. Step s is the work with the keys of rank - s."""

    rank: int
    seqlen: int  # tokens per rank
    groups: list[list[int]]  # steps whose keys travel together; the same on every rank
    keys: ByStep  # keys of rank - s that queries of this rank see, for s > 0
    lent: ByStep  # keys of this rank that rank + s sees, for s > 0
    smallest: Tensor | None  # of all ranks, see `find_smallest`

    @cached_property
    def rows(self) -> ByStep:
        """The queries of each step: all in step 0, later those that see keys of rank - s."""
        rows = {0: slice(0, self.seqlen)}
        if self.smallest is not None:
            size = len(self.smallest)
            for step in self.keys:
                source = (self.rank - step) % size
                rows[step] = find_rows(
                    self.smallest[self.rank], self.rank, source, size, self.seqlen
                )
        return rows


@dataclass(frozen=True)
class Planner:
    """Smallest first keys of all ranks, on their way to the host."""

    ring: Ring
    seqlen: int
    gathered: Gathered | None  # None if no rank can see keys of another

    @classmethod
    def of(cls, ring: Ring, first_key: Tensor) -> Planner:
        """Send this rank's smallest first keys to all ranks."""
        seqlen = first_key.shape[-1]
        if ring.size == 1 or first_key.numel() == 0:
            return cls(ring, seqlen, None)
        return cls(ring, seqlen, ring.gather(find_smallest(first_key)))

    def wait(self) -> Plan:
        """Return the plan."""
        if self.gathered is None:
            return Plan(self.ring.rank, self.seqlen, [[0]], {}, {}, None)
        return plan_exchange(self.ring.rank, self.seqlen, self.gathered.wait())


def find_smallest(first_key: Tensor) -> Tensor:
    """Return [2, n]: the smallest first key of ROWS queries each, of both chunks."""
    chunks = first_key.long().reshape(-1, 2, first_key.shape[-1] // 2)
    smallest = chunks.amin(0) if len(chunks) > 1 else chunks[0]
    missing = -smallest.shape[1] % ROWS
    padded = pad(smallest, (0, missing), value=NEVER) if missing else smallest
    rows: Tensor = padded.unflatten(1, (-1, ROWS))
    return rows.amin(2)


def plan_exchange(rank: int, seqlen: int, smallest: Tensor) -> Plan:
    """Return a rank's plan; the GPU waits for it.

    Args:
        rank: The rank.
        seqlen: Tokens per rank.
        smallest: [ranks, 2, n], what `find_smallest` returned on each rank, on the CPU.
    """
    size = len(smallest)
    ranges = find_key_ranges(smallest.amin(2).tolist(), seqlen)
    lengths = [[0] * (2 * size) for _ in range(size)]
    keys, lent = {}, {}
    for (one, source), tokens in ranges.items():
        step = (one - source) % size
        lengths[step][one] = lengths[step][size + source] = tokens.stop - tokens.start
        if one == rank:
            keys[step] = tokens
        if source == rank:
            lent[step] = tokens
    return Plan(rank, seqlen, group_steps(lengths, seqlen), keys, lent, smallest)


def find_key_ranges(smallest: list[list[int]], seqlen: int) -> dict[tuple[int, int], slice]:
    """Return the keys of another rank that any query of a rank sees, by (rank, other rank).

    A token sees all tokens from its first key up to itself. So a chunk sees the end of one earlier
    chunk and all of those in between: of another rank's two chunks, one range.

    Args:
        smallest: The smallest first key of both chunks of each rank.
        seqlen: Tokens per rank.
    """
    half, last = seqlen // 2, 2 * len(smallest) - 1
    ranges: dict[tuple[int, int], slice] = {}
    for rank, firsts in enumerate(smallest):
        for first, chunk in zip(firsts, (rank, last - rank), strict=True):
            for other in range(max(first, 0) // half, chunk):
                source = min(other, last - other)
                if source == rank:
                    continue
                start = max(first - other * half, 0) + (0 if other == source else half)
                known = ranges.get((rank, source))
                start = start if known is None else min(start, known.start)
                # Both chunks of a later rank are before our last chunk, but one of an earlier rank.
                end = half if source < rank else seqlen
                ranges[rank, source] = slice(start - start % KEYS, end)
    return ranges


def find_rows(smallest: Tensor, rank: int, source: int, size: int, seqlen: int) -> slice:
    """Return a range with all queries of a rank that see keys of another rank; there is one.

    Args:
        smallest: [2, n], what `find_smallest` returned, on the CPU.
        rank: The rank.
        source: The other rank.
        size: The number of ranks.
        seqlen: Tokens per rank.
    """
    half, count = seqlen // 2, smallest.shape[1]
    end = (source + 1 if source < rank else 2 * size - source) * half
    visible = smallest < end
    if source > rank:
        visible[0] = False  # both of their chunks are after our first one
    found = visible.flatten().nonzero().flatten().tolist()
    chunk, block = divmod(found[0], count)
    last_chunk, last_block = divmod(found[-1], count)
    return slice(
        chunk * half + block * ROWS, last_chunk * half + min((last_block + 1) * ROWS, half)
    )


def count_before(position: Tensor, source: int, size: int, half: int) -> Tensor:
    """Return how many keys of a rank are before a position of the whole sequence."""
    begin, later = source * half, (2 * size - 1 - source) * half
    return (position - begin).clamp(0, half) + (position - later).clamp(0, half)


def group_steps(lengths: list[list[int]], most: int) -> list[list[int]]:
    """Return consecutive steps in groups, without those in which no rank gets a key.

    Args:
        lengths: For each step, the numbers of keys that are to be limited: those that each rank
            gets, and those that it lends.
        most: The largest sum of each number over the steps of a group.
    """
    groups = [[0]]
    load = [most] * len(lengths[0])
    for step, more in enumerate(lengths[1:], 1):
        if not any(more):
            continue
        together = [a + b for a, b in zip(load, more, strict=True)]
        if len(groups) > 1 and max(together) <= most:
            groups[-1].append(step)
            load = together
        else:
            groups.append([step])
            load = more
    return groups


def find_intervals(
    ring: Ring, source: int, first_key: Tensor, rows: slice, keys: slice
) -> IntervalMask:
    """Return which of a range of keys a range of queries sees.

    Both chunks of a rank are in the order of the sequence: a range of positions is a range of keys.

    Args:
        ring: The ranks; this one has the queries.
        source: The rank with the keys.
        first_key: As in `ring_attention`.
        rows: The queries. Keys of another rank must be before all of them.
        keys: The keys.
    """
    half, length, size = first_key.shape[-1] // 2, keys.stop - keys.start, ring.size
    first = first_key[..., rows].long()
    if source != ring.rank and (keys.start >= half or keys.stop <= half):  # of one chunk
        before = (2 * size - 1 - source) * half - half if keys.start >= half else source * half
        begin = first - (before + keys.start)
    else:
        begin = count_before(first, source, size, half) - keys.start
    end = torch.full_like(begin, length)
    return IntervalMask.of(begin, end, seqlen_k=length, causal=source == ring.rank)

"""Plans which keys ranks exchange, from the smallest `first_key` of every 128 queries."""

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

ROWS: Final = 128  # ranks exchange only the smallest first_key of this many queries
# A range of keys begins at a multiple of this number, which the key blocks of most kernels divide.
# So a kernel sums over the same key blocks as in a call with all keys.
KEYS: Final = 384
NEVER: Final = 1 << 52  # greater than any token; exact in a float, which `pad` takes


@dataclass(frozen=True)
class Plan:
    """A rank's share of the exchange. Step s is the work with the keys of rank - s."""

    rank: int
    seqlen: int  # tokens per rank
    groups: list[list[int]]  # steps whose keys are sent together; the same on every rank
    keys: ByStep  # keys of rank - s that queries of this rank attend to, for s > 0
    lent: ByStep  # keys of this rank that queries of rank + s attend to, for s > 0
    smallest: Tensor | None  # results of `find_smallest` on all ranks; None without exchange

    @cached_property
    def rows(self) -> ByStep:
        """Queries by step: all in step 0, then a range with all that need keys of rank - s."""
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
    """The smallest first keys of all ranks, which are being copied to the host."""

    ring: Ring
    seqlen: int
    gathered: Gathered | None  # None for one rank, or without tokens

    @classmethod
    def of(cls, ring: Ring, first_key: Tensor) -> Planner:
        """Start to gather the smallest first keys of all ranks."""
        seqlen = first_key.shape[-1]
        if ring.size == 1 or first_key.numel() == 0:
            return cls(ring, seqlen, None)
        return cls(ring, seqlen, ring.gather(find_smallest(first_key)))

    def wait(self) -> Plan:
        """Return the plan; the host waits for all ranks."""
        if self.gathered is None:
            return Plan(self.ring.rank, self.seqlen, [[0]], {}, {}, None)
        return plan_exchange(self.ring.rank, self.seqlen, self.gathered.wait())


def find_smallest(first_key: Tensor) -> Tensor:
    """Return [2, n]: for each of the two chunks, the smallest first key of every ROWS queries."""
    chunks = first_key.long().reshape(-1, 2, first_key.shape[-1] // 2)
    smallest = chunks.amin(0) if len(chunks) > 1 else chunks[0]
    missing = -smallest.shape[1] % ROWS
    padded = pad(smallest, (0, missing), value=NEVER) if missing else smallest
    rows: Tensor = padded.unflatten(1, (-1, ROWS))
    return rows.amin(2)


def plan_exchange(rank: int, seqlen: int, smallest: Tensor) -> Plan:
    """Return a rank's plan. This must be fast, because the GPU may be idle until it returns.

    Args:
        rank: The rank.
        seqlen: Tokens per rank.
        smallest: [ranks, 2, n] on the CPU: the result of `find_smallest` on each rank.
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
    """Return the keys that each rank needs from each other rank, by (rank, other rank).

    A token attends to all tokens from its first key up to itself. So a chunk attends to the end of
    an earlier chunk and to all chunks between the two. Of another rank's tokens, this is one range.

    Args:
        smallest: For each rank, the smallest first keys of its two chunks.
        seqlen: Tokens per rank.

    Returns:
        Ranges that begin at multiples of KEYS; pairs of ranks that exchange nothing are absent.
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
                # Both chunks of a later rank are before our last chunk, one of an earlier rank.
                end = half if source < rank else seqlen
                ranges[rank, source] = slice(start - start % KEYS, end)
    return ranges


def find_rows(smallest: Tensor, rank: int, source: int, size: int, seqlen: int) -> slice:
    """Return the smallest range, in blocks of ROWS, with all queries that need another rank's keys.

    Args:
        smallest: [2, n] on the CPU: the result of `find_smallest` on the rank with the queries.
        rank: The rank with the queries, of which at least one must need the keys.
        source: The rank with the keys.
        size: The number of ranks.
        seqlen: Tokens per rank.
    """
    half, count = seqlen // 2, smallest.shape[1]
    end = (source + 1 if source < rank else 2 * size - source) * half
    visible = smallest < end
    if source > rank:
        visible[0] = False  # both chunks of source are after our first chunk
    found = visible.flatten().nonzero().flatten().tolist()
    chunk, block = divmod(found[0], count)
    last_chunk, last_block = divmod(found[-1], count)
    return slice(
        chunk * half + block * ROWS, last_chunk * half + min((last_block + 1) * ROWS, half)
    )


def count_before(position: Tensor, source: int, size: int, half: int) -> Tensor:
    """Return how many keys of rank `source` are before each position of the whole sequence."""
    begin, later = source * half, (2 * size - 1 - source) * half
    return (position - begin).clamp(0, half) + (position - later).clamp(0, half)


def group_steps(lengths: list[list[int]], most: int) -> list[list[int]]:
    """Group consecutive steps; leave out steps in which no rank receives keys.

    Args:
        lengths: For each step, the number of keys that each rank receives, followed by the number
            that each rank sends.
        most: The largest allowed sum of any of these numbers over the steps of a group.
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
    """Return the mask between a range of queries and a range of keys.

    The two chunks of a rank are in sequence order, so the visible keys of a query are contiguous.

    Args:
        ring: The ranks; this one has the queries.
        source: The rank with the keys.
        first_key: As in `ring_attention`.
        rows: The queries. If source is another rank, all of `keys` must be before them.
        keys: The keys.
    """
    half, length, size = first_key.shape[-1] // 2, keys.stop - keys.start, ring.size
    first = first_key[..., rows].long()
    if source != ring.rank and (keys.start >= half or keys.stop <= half):  # all in one chunk
        before = (2 * size - 1 - source) * half - half if keys.start >= half else source * half
        begin = first - (before + keys.start)
    else:
        begin = count_before(first, source, size, half) - keys.start
    end = torch.full_like(begin, length)
    return IntervalMask.of(begin, end, seqlen_k=length, causal=source == ring.rank)

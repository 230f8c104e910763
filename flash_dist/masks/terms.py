"""What masks are made of: each term shows some keys to each query, a mask what all terms show.

A term says three things: the calls it suits, the interval of keys of each query (or None if they
are no interval, then the words of bits.py), and, by its definition and sharing nothing with the
other two, which pairs it shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .band import Band
from .bits import pack, unpack
from .inputs import Shape, Sizes, require_most

Tensor = torch.Tensor
Intervals = tuple[Tensor, Tensor]
Part = tuple[slice, slice, slice]


@dataclass(frozen=True, eq=False)
class Term(ABC):
    """One of the things that decide what a query sees. Its tensors are on the CPU."""

    name: ClassVar[str]
    sizes: Sizes = field(init=False, default=Sizes())

    def check(self, shape: Shape) -> None:
        """Raise ValueError if the term does not suit a call."""
        self.sizes.require(shape)

    @abstractmethod
    def intervals(self, shape: Shape) -> Intervals | None:
        """Return lo and hi [batch or 1, heads or 1, seqlen_q or 1]: query i sees lo <= j < hi."""

    def words(self, part: Part, shape: Shape) -> Tensor:
        """Return the words of a part of [batch, heads, seqlen_q], see bits.py.

        Batch and heads that do not matter are 1. Only asked of terms that are no intervals.
        """
        raise NotImplementedError

    @abstractmethod
    def visible(self, shape: Shape) -> Tensor:
        """Return booleans [batch or 1, heads or 1, seqlen_q, seqlen_k], by the definition."""


@dataclass(frozen=True, eq=False)
class BandTerm(Term):
    """Keys around the diagonal."""

    name = "band"
    band: Band

    def intervals(self, shape: Shape) -> Intervals:
        """See Term."""
        left, right, bottom_right = self.band
        rows = torch.arange(shape.seqlen_q).view(1, 1, -1)
        if bottom_right:
            rows = rows + (shape.seqlen_k - shape.seqlen_q)
        lo = torch.zeros_like(rows) if left < 0 else rows - left
        hi = torch.full_like(rows, shape.seqlen_k) if right < 0 else rows + right + 1
        return lo, hi

    def visible(self, shape: Shape) -> Tensor:
        """See Term."""
        i = torch.arange(shape.seqlen_q).unsqueeze(1)
        j = torch.arange(shape.seqlen_k).unsqueeze(0)
        shift = shape.seqlen_k - shape.seqlen_q if self.band.bottom_right else 0
        seen = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool)
        if self.band.left >= 0:
            seen &= j >= i + shift - self.band.left
        if self.band.right >= 0:
            seen &= j <= i + shift + self.band.right
        return seen[None, None]


@dataclass(frozen=True, eq=False)
class PaddingTerm(Term):
    """Keys that exist."""

    name = "padding"
    lengths: Tensor  # [batch]
    at_end: bool  # the padding comes after the keys

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes(batch=len(self.lengths)))

    def check(self, shape: Shape) -> None:
        """See Term."""
        super().check(shape)
        require_most("lengths", self.lengths, shape.seqlen_k)

    def bounds(self, shape: Shape) -> Intervals:
        """Return the first and end key [batch]."""
        if self.at_end:
            return torch.zeros_like(self.lengths), self.lengths
        return shape.seqlen_k - self.lengths, torch.full_like(self.lengths, shape.seqlen_k)

    def intervals(self, shape: Shape) -> Intervals:
        """See Term."""
        lo, hi = self.bounds(shape)
        return lo.view(-1, 1, 1), hi.view(-1, 1, 1)

    def visible(self, shape: Shape) -> Tensor:
        """See Term."""
        keys, lengths = torch.arange(shape.seqlen_k), self.lengths.view(-1, 1, 1, 1)
        seen = keys < lengths if self.at_end else keys >= shape.seqlen_k - lengths
        return seen.expand(-1, 1, shape.seqlen_q, shape.seqlen_k)


@dataclass(frozen=True, eq=False)
class PrefixTerm(Term):
    """Causal, and every query sees a prefix of the keys."""

    name = "prefix"
    lengths: Tensor  # [batch]
    bottom_right: bool

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes(batch=len(self.lengths)))

    def check(self, shape: Shape) -> None:
        """See Term."""
        super().check(shape)
        require_most("lengths", self.lengths, shape.seqlen_k)

    def intervals(self, shape: Shape) -> Intervals:
        """See Term."""
        shift = shape.seqlen_k - shape.seqlen_q if self.bottom_right else 0
        hi = torch.maximum(
            torch.arange(1 + shift, 1 + shift + shape.seqlen_q), self.lengths.view(-1, 1, 1)
        )
        return torch.zeros_like(hi), hi

    def visible(self, shape: Shape) -> Tensor:
        """See Term."""
        causal = BandTerm(Band(-1, 0, self.bottom_right)).visible(shape)
        in_prefix = torch.arange(shape.seqlen_k) < self.lengths.view(-1, 1, 1, 1)
        return causal | in_prefix


@dataclass(frozen=True, eq=False)
class IntervalTerm(Term):
    """One interval of keys for each query."""

    name = "intervals"
    lo: Tensor  # [batch or 1, heads or 1, seqlen_q]
    hi: Tensor
    seqlen_k: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes.of(self.lo.shape, self.seqlen_k))

    def check(self, shape: Shape) -> None:
        """See Term."""
        super().check(shape)
        require_most("hi", self.hi, shape.seqlen_k)

    def intervals(self, shape: Shape) -> Intervals:  # noqa: ARG002 - they are given
        """See Term."""
        return self.lo, self.hi

    def visible(self, shape: Shape) -> Tensor:
        """See Term."""
        keys = torch.arange(shape.seqlen_k)
        return (self.lo.unsqueeze(-1) <= keys) & (keys < self.hi.unsqueeze(-1))


@dataclass(frozen=True, eq=False)
class _IdsTerm(Term):
    """Queries and keys with numbers."""

    q_ids: Tensor  # [batch or 1, seqlen_q]
    k_ids: Tensor  # [batch or 1, seqlen_k]

    def __post_init__(self) -> None:
        batch = max(len(self.q_ids), len(self.k_ids))
        sizes = Sizes(batch, None, self.q_ids.shape[1], self.k_ids.shape[1])
        object.__setattr__(self, "sizes", sizes)

    @abstractmethod
    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        """Whether queries see keys."""

    def _sorted_ids(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_ids, and k_ids ascending with the keys they belong to, of equal batches."""
        values, order = self.k_ids.sort(dim=-1, stable=True)
        batch, _ = self.sizes.planes()
        q_ids, values, order = (
            x.expand(batch, -1).contiguous() for x in (self.q_ids, values, order)
        )
        return q_ids, values, order

    def words(self, part: Part, shape: Shape) -> Tensor:  # noqa: ARG002 - the ids' own
        """See Term."""
        batch, _, rows = part
        q_ids = self.q_ids[batch if len(self.q_ids) > 1 else slice(0, 1), rows]
        k_ids = self.k_ids[batch if len(self.k_ids) > 1 else slice(0, 1)]
        return pack(self._sees(q_ids.unsqueeze(-1), k_ids.unsqueeze(1))).unsqueeze(1)

    def visible(self, shape: Shape) -> Tensor:  # noqa: ARG002 - the ids' own
        """See Term."""
        return self._sees(self.q_ids[:, None, :, None], self.k_ids[:, None, None, :])


@dataclass(frozen=True, eq=False)
class BlockCausalTerm(_IdsTerm):
    """A query sees the keys of its block and of those before: k_id <= q_id."""

    name = "block-causal"

    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        return k_ids <= q_ids

    def intervals(self, shape: Shape) -> Intervals | None:  # noqa: ARG002 - the ids' own
        """See Term."""
        q_ids, values, order = self._sorted_ids()
        count = torch.searchsorted(values, q_ids, right=True)
        last = (count - 1).clamp(min=0)
        lo = order.cummin(-1).values.gather(-1, last)
        hi = order.cummax(-1).values.gather(-1, last) + 1
        return _contiguous(lo, hi, count)


@dataclass(frozen=True, eq=False)
class DocumentTerm(_IdsTerm):
    """A query sees the keys of its document: k_id == q_id."""

    name = "documents"

    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        return k_ids == q_ids

    def intervals(self, shape: Shape) -> Intervals | None:
        """See Term."""
        q_ids, values, order = self._sorted_ids()
        first = torch.searchsorted(values, q_ids)
        end = torch.searchsorted(values, q_ids, right=True)
        lo = order.gather(-1, first.clamp(max=shape.seqlen_k - 1))
        hi = order.gather(-1, (end - 1).clamp(min=0)) + 1
        return _contiguous(lo, hi, end - first)


def _contiguous(lo: Tensor, hi: Tensor, count: Tensor) -> Intervals | None:
    """Return intervals [batch, 1, seqlen_q] if none of them has a gap, or None.

    Args:
        lo: [batch, seqlen_q], the first key a query sees.
        hi: One more than the last one.
        count: How many it sees.
    """
    seen = count > 0
    if bool((seen & (hi - lo != count)).any()):
        return None
    return torch.where(seen, lo, 0).unsqueeze(1), torch.where(seen, hi, 0).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class DenseTerm(Term):
    """A bit for each pair."""

    name = "dense"
    bits: Tensor  # words [batch or 1, heads or 1, seqlen_q, ceil(seqlen_k / 64)]
    seqlen_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes.of(self.bits.shape, self.seqlen_k))

    def intervals(self, shape: Shape) -> None:  # noqa: ARG002 - the planner looks at the words
        """See Term."""
        return

    def words(self, part: Part, shape: Shape) -> Tensor:  # noqa: ARG002 - of the bits
        """See Term."""
        batch, heads, rows = part
        one = slice(0, 1)
        return self.bits[
            batch if self.bits.shape[0] > 1 else one,
            heads if self.bits.shape[1] > 1 else one,
            rows,
        ]

    def visible(self, shape: Shape) -> Tensor:
        """See Term."""
        return unpack(self.bits, shape.seqlen_k)


@dataclass(frozen=True, eq=False)
class TilesTerm(Term):
    """A bit for each pair of a block of queries and a block of keys."""

    name = "tiles"
    tiles: Tensor  # booleans [batch or 1, heads or 1, query blocks, key blocks]
    block_q: int
    block_k: int
    seqlen_q: int
    seqlen_k: int

    def __post_init__(self) -> None:
        sizes = Sizes(self.tiles.shape[0], self.tiles.shape[1], self.seqlen_q, self.seqlen_k)
        object.__setattr__(self, "sizes", sizes)

    def intervals(self, shape: Shape) -> None:  # noqa: ARG002 - the planner looks at the words
        """See Term."""
        return

    def words(self, part: Part, shape: Shape) -> Tensor:
        """See Term."""
        batch, heads, rows = part
        one = slice(0, 1)
        tiles = self.tiles[
            batch if self.tiles.shape[0] > 1 else one, heads if self.tiles.shape[1] > 1 else one
        ]
        first, end = rows.start // self.block_q, -(-rows.stop // self.block_q)
        columns = torch.arange(shape.seqlen_k) // self.block_k
        words = pack(tiles[:, :, first:end, columns])
        return words[:, :, torch.arange(rows.start, rows.stop) // self.block_q - first]

    def visible(self, shape: Shape) -> Tensor:
        """See Term."""
        seen = self.tiles.repeat_interleave(self.block_q, 2).repeat_interleave(self.block_k, 3)
        return seen[:, :, : shape.seqlen_q, : shape.seqlen_k]

"""Terms of masks. A term limits the keys of each query; a mask is the intersection of its terms.

A term checks whether it fits a call, and returns the keys that each query attends to: as intervals
if possible, else as words of bits.py. Tests compare these with `visible`, which follows the term's
definition and shares no code with the other methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from .band import Band
from .bits import WORD, pack, unpack
from .inputs import Shape, Sizes, require_most

Tensor = torch.Tensor
Intervals = tuple[Tensor, Tensor]
Part = tuple[slice, slice, slice]


@dataclass(frozen=True, eq=False)
class Term(ABC):
    """One term of a mask. Its tensors are on the CPU."""

    name: ClassVar[str]
    sizes: Sizes = field(init=False, default=Sizes())

    def check(self, shape: Shape) -> None:
        """Raise ValueError if the term does not fit a call."""
        self.sizes.require(shape)

    def values(self) -> tuple[Any, ...]:
        """Return the values to save in a file; a Band becomes a tuple.

        Tensors are copied, because saving a view would save its whole storage.
        """
        given = (getattr(self, one.name) for one in fields(self) if one.init)
        return tuple(
            x.clone() if isinstance(x, Tensor) else tuple(x) if isinstance(x, Band) else x
            for x in given
        )

    def part(self, batch: slice, heads: slice) -> Term:  # noqa: ARG002 - the same for all parts
        """Return the term for some batch entries and heads, with tensors that are views.

        An axis of size 1 is not sliced.
        """
        return self

    @abstractmethod
    def intervals(self, shape: Shape) -> Intervals | None:
        """Return lo and hi: query i attends to exactly the keys j with lo[i] <= j < hi[i].

        Both have shape [batch or 1, heads or 1, seqlen_q or 1], and may exceed [0, seqlen_k].
        Return None if the visible keys of some query are not known to be contiguous.
        """

    def hull(self, shape: Shape) -> Intervals | None:  # noqa: ARG002 - only for terms with a hull
        """Return intervals that contain all visible keys of each query; None if none are known."""
        return None

    def words(self, part: Part, columns: slice, shape: Shape) -> Tensor:
        """Return some columns of the words for a part of [batch, heads, seqlen_q], see bits.py.

        Only called for terms whose `intervals` returns None. The axis of batch or heads is 1 if the
        term is the same along it. Bits of keys outside of the hull may have any value.
        """
        raise NotImplementedError

    @abstractmethod
    def visible(self, shape: Shape) -> Tensor:
        """Return which keys each query attends to, from the term's definition.

        The result is booleans [batch or 1, heads or 1, seqlen_q, seqlen_k].
        """


@dataclass(frozen=True, eq=False)
class BandTerm(Term):
    """Each query attends to the keys of a band around the diagonal."""

    name = "band"
    band: Band

    def intervals(self, shape: Shape) -> Intervals:
        """See `Term.intervals`."""
        left, right, bottom_right = self.band
        rows = torch.arange(shape.seqlen_q, device="cpu").view(1, 1, -1)
        if bottom_right:
            rows = rows + (shape.seqlen_k - shape.seqlen_q)
        lo = torch.zeros_like(rows) if left < 0 else rows - left
        hi = torch.full_like(rows, shape.seqlen_k) if right < 0 else rows + right + 1
        return lo, hi

    def visible(self, shape: Shape) -> Tensor:
        """See `Term.visible`."""
        i = torch.arange(shape.seqlen_q, device="cpu").unsqueeze(1)
        j = torch.arange(shape.seqlen_k, device="cpu").unsqueeze(0)
        shift = shape.seqlen_k - shape.seqlen_q if self.band.bottom_right else 0
        visible = torch.ones(shape.seqlen_q, shape.seqlen_k, dtype=torch.bool, device="cpu")
        if self.band.left >= 0:
            visible &= j >= i + shift - self.band.left
        if self.band.right >= 0:
            visible &= j <= i + shift + self.band.right
        return visible[None, None]


@dataclass(frozen=True, eq=False)
class LengthsTerm(Term):
    """A term defined by a number of keys per batch entry."""

    lengths: Tensor  # [batch]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes(batch=len(self.lengths)))

    def check(self, shape: Shape) -> None:
        """See `Term.check`."""
        super().check(shape)
        require_most("lengths", self.lengths, shape.seqlen_k)

    def part(self, batch: slice, heads: slice) -> Term:  # noqa: ARG002 - the same for all heads
        """See `Term.part`."""
        return replace(self, lengths=_entries(self.lengths, batch))


@dataclass(frozen=True, eq=False)
class PaddingTerm(LengthsTerm):
    """Each query attends to all keys that are not padding."""

    name = "padding"
    at_end: bool  # the padding comes after the other keys

    def bounds(self, shape: Shape) -> Intervals:
        """Return the first key and the end of the keys that are not padding, each [batch]."""
        if self.at_end:
            return torch.zeros_like(self.lengths), self.lengths
        return shape.seqlen_k - self.lengths, torch.full_like(self.lengths, shape.seqlen_k)

    def intervals(self, shape: Shape) -> Intervals:
        """See `Term.intervals`."""
        lo, hi = self.bounds(shape)
        return lo.view(-1, 1, 1), hi.view(-1, 1, 1)

    def visible(self, shape: Shape) -> Tensor:
        """See `Term.visible`."""
        keys, lengths = torch.arange(shape.seqlen_k, device="cpu"), self.lengths.view(-1, 1, 1, 1)
        visible = keys < lengths if self.at_end else keys >= shape.seqlen_k - lengths
        return visible.expand(-1, 1, shape.seqlen_q, shape.seqlen_k)


@dataclass(frozen=True, eq=False)
class PrefixTerm(LengthsTerm):
    """Causal, except for a prefix of the keys that every query attends to."""

    name = "prefix"
    bottom_right: bool

    def intervals(self, shape: Shape) -> Intervals:
        """See `Term.intervals`."""
        shift = shape.seqlen_k - shape.seqlen_q if self.bottom_right else 0
        ends = torch.arange(1 + shift, 1 + shift + shape.seqlen_q, device="cpu")
        hi = torch.maximum(ends, self.lengths.view(-1, 1, 1))
        return torch.zeros_like(hi), hi

    def visible(self, shape: Shape) -> Tensor:
        """See `Term.visible`."""
        causal = BandTerm(Band(-1, 0, self.bottom_right)).visible(shape)
        in_prefix = torch.arange(shape.seqlen_k, device="cpu") < self.lengths.view(-1, 1, 1, 1)
        return causal | in_prefix


@dataclass(frozen=True, eq=False)
class IntervalTerm(Term):
    """Each query attends to one interval of keys."""

    name = "intervals"
    lo: Tensor  # [batch or 1, heads or 1, seqlen_q]
    hi: Tensor
    seqlen_k: int | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes.of(self.lo.shape, self.seqlen_k))

    def check(self, shape: Shape) -> None:
        """See `Term.check`."""
        super().check(shape)
        require_most("hi", self.hi, shape.seqlen_k)

    def part(self, batch: slice, heads: slice) -> Term:
        """See `Term.part`."""
        lo, hi = (_planes(x, (batch, heads, slice(None))) for x in (self.lo, self.hi))
        return replace(self, lo=lo, hi=hi)

    def intervals(self, shape: Shape) -> Intervals:  # noqa: ARG002 - the bounds are stored
        """See `Term.intervals`."""
        return self.lo, self.hi

    def visible(self, shape: Shape) -> Tensor:
        """See `Term.visible`."""
        keys = torch.arange(shape.seqlen_k, device="cpu")
        return (self.lo.unsqueeze(-1) <= keys) & (keys < self.hi.unsqueeze(-1))


@dataclass(frozen=True, eq=False)
class DenseTerm(Term):
    """A mask with one bit per pair of query and key."""

    name = "dense"
    bits: Tensor  # words [batch or 1, heads or 1, seqlen_q, ceil(seqlen_k / 64)]
    seqlen_k: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", Sizes.of(self.bits.shape, self.seqlen_k))

    def part(self, batch: slice, heads: slice) -> Term:
        """See `Term.part`."""
        return replace(self, bits=_planes(self.bits, (batch, heads, slice(None))))

    def intervals(self, shape: Shape) -> None:  # noqa: ARG002 - the planner reads the words
        """See `Term.intervals`."""
        return

    def words(self, part: Part, columns: slice, shape: Shape) -> Tensor:  # noqa: ARG002 - the bits are stored
        """See `Term.words`."""
        return _planes(self.bits, part)[:, :, part[2], columns]

    def visible(self, shape: Shape) -> Tensor:
        """See `Term.visible`."""
        return unpack(self.bits, shape.seqlen_k)


@dataclass(frozen=True, eq=False)
class TilesTerm(Term):
    """A mask with one boolean per pair of query block and key block."""

    name = "tiles"
    tiles: Tensor  # booleans [batch or 1, heads or 1, query blocks, key blocks]
    block_q: int
    block_k: int
    seqlen_q: int
    seqlen_k: int

    def __post_init__(self) -> None:
        sizes = Sizes(self.tiles.shape[0], self.tiles.shape[1], self.seqlen_q, self.seqlen_k)
        object.__setattr__(self, "sizes", sizes)

    def part(self, batch: slice, heads: slice) -> Term:
        """See `Term.part`."""
        return replace(self, tiles=_planes(self.tiles, (batch, heads, slice(None))))

    def intervals(self, shape: Shape) -> None:  # noqa: ARG002 - the planner reads the words
        """See `Term.intervals`."""
        return

    def words(self, part: Part, columns: slice, shape: Shape) -> Tensor:
        """See `Term.words`."""
        rows = part[2]
        tiles = _planes(self.tiles, part)
        first, end = rows.start // self.block_q, -(-rows.stop // self.block_q)
        stop = min(columns.stop * WORD, shape.seqlen_k)
        keys = torch.arange(columns.start * WORD, stop, device="cpu") // self.block_k
        words = pack(tiles[:, :, first:end, keys])
        lines = torch.arange(rows.start, rows.stop, device="cpu") // self.block_q
        return words[:, :, lines - first]

    def visible(self, shape: Shape) -> Tensor:
        """See `Term.visible`."""
        visible = self.tiles.repeat_interleave(self.block_q, 2).repeat_interleave(self.block_k, 3)
        return visible[:, :, : shape.seqlen_q, : shape.seqlen_k]


@dataclass(frozen=True, eq=False)
class _IdsTerm(Term):
    """A term that compares an id of each query with an id of each key.

    The ids are those of blocks or documents, in any order. The term has intervals if the visible
    keys of each query are contiguous.
    """

    q_ids: Tensor  # [batch or 1, seqlen_q]
    k_ids: Tensor  # [batch or 1, seqlen_k]

    def __post_init__(self) -> None:
        batch = max(len(self.q_ids), len(self.k_ids))
        sizes = Sizes(batch, None, self.q_ids.shape[1], self.k_ids.shape[1])
        object.__setattr__(self, "sizes", sizes)

    def part(self, batch: slice, heads: slice) -> Term:  # noqa: ARG002 - the same for all heads
        """See `Term.part`."""
        q_ids, k_ids = (x[batch] if len(x) > 1 else x for x in (self.q_ids, self.k_ids))
        return replace(self, q_ids=q_ids, k_ids=k_ids)

    @abstractmethod
    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        """Return whether queries with ids `q_ids` attend to keys with ids `k_ids`."""

    def _sorted_ids(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_ids, the sorted k_ids, and the key index of each sorted id.

        q_ids have shape [batch, seqlen_q], the others [batch, seqlen_k].
        """
        values, order = self.k_ids.sort(dim=-1, stable=True)
        batch, _ = self.sizes.planes()
        q_ids, values, order = (
            x.expand(batch, -1).contiguous() for x in (self.q_ids, values, order)
        )
        return q_ids, values, order

    def words(self, part: Part, columns: slice, shape: Shape) -> Tensor:  # noqa: ARG002 - the term knows its sizes
        """See `Term.words`."""
        batch, _, rows = part
        keys = slice(columns.start * WORD, columns.stop * WORD)
        q_ids = self.q_ids[batch if len(self.q_ids) > 1 else slice(0, 1), rows]
        k_ids = self.k_ids[batch if len(self.k_ids) > 1 else slice(0, 1), keys]
        return pack(self._sees(q_ids.unsqueeze(-1), k_ids.unsqueeze(1))).unsqueeze(1)

    def visible(self, shape: Shape) -> Tensor:  # noqa: ARG002 - the term knows its sizes
        """See `Term.visible`."""
        return self._sees(self.q_ids[:, None, :, None], self.k_ids[:, None, None, :])


@dataclass(frozen=True, eq=False)
class BlockCausalTerm(_IdsTerm):
    """A query attends to the keys of its own block and of blocks with lower ids: k_id <= q_id."""

    name = "block-causal"

    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        return k_ids <= q_ids

    def intervals(self, shape: Shape) -> Intervals | None:  # noqa: ARG002 - the term knows its sizes
        """See `Term.intervals`."""
        q_ids, values, order = self._sorted_ids()
        count = torch.searchsorted(values, q_ids, right=True)
        last = (count - 1).clamp(min=0)
        lo = order.cummin(-1).values.gather(-1, last)
        hi = order.cummax(-1).values.gather(-1, last) + 1
        return _contiguous(lo, hi, count)


@dataclass(frozen=True, eq=False)
class DocumentTerm(_IdsTerm):
    """A query attends to the keys of its document: k_id == q_id."""

    name = "documents"

    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        return k_ids == q_ids

    def intervals(self, shape: Shape) -> Intervals | None:
        """See `Term.intervals`."""
        q_ids, values, order = self._sorted_ids()
        first = torch.searchsorted(values, q_ids)
        end = torch.searchsorted(values, q_ids, right=True)
        lo = order.gather(-1, first.clamp(max=shape.seqlen_k - 1))
        hi = order.gather(-1, (end - 1).clamp(min=0)) + 1
        return _contiguous(lo, hi, end - first)


def _contiguous(lo: Tensor, hi: Tensor, count: Tensor) -> Intervals | None:
    """Return lo and hi [batch, 1, seqlen_q]; None if a query's visible keys are not contiguous.

    Args:
        lo: [batch, seqlen_q], the first key that a query attends to.
        hi: Likewise, one more than the last key that a query attends to.
        count: Likewise, the number of keys that a query attends to. If it is 0, lo and hi are
            ignored.
    """
    visible = count > 0
    if bool((visible & (hi - lo != count)).any()):
        return None
    return torch.where(visible, lo, 0).unsqueeze(1), torch.where(visible, hi, 0).unsqueeze(1)


def _entries(x: Tensor, batch: slice) -> Tensor:
    """Return some batch entries; an axis of size 1 is not sliced."""
    return x[batch] if len(x) > 1 else x


def _planes(x: Tensor, part: Part) -> Tensor:
    """Return the batch entries and heads of a part; an axis of size 1 is not sliced."""
    batch, heads, _ = part
    one = slice(0, 1)
    return x[batch if x.shape[0] > 1 else one, heads if x.shape[1] > 1 else one]

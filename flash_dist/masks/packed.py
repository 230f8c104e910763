"""Masks of packed sequences: each sequence has its own mask over its queries and keys."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .bits import WORD, pack, unpack, words_of
from .inputs import Shape, Sizes, complain, parse_integers
from .planner import split_terms
from .terms import Term

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .inputs import Integers
    from .terms import Intervals, Part

Tensor = torch.Tensor
Terms = tuple[Term, ...]


class _Sequence(NamedTuple):
    """The queries and keys of one sequence in the pack, and its mask."""

    rows: slice  # queries in the pack
    keys: slice  # keys in the pack
    shape: Shape  # of the sequence alone
    intervals: Intervals  # lo, hi [1, heads, queries], counted from the sequence's first key
    others: list[Term]  # terms without intervals


@dataclass(frozen=True, eq=False)
class PackedTerm(Term):
    """Each query attends to the keys of its own sequence that the sequence's mask allows."""

    name = "packed"
    masks: tuple[Terms, ...]  # one per sequence, or one for all
    ends_q: Tensor  # [sequences + 1]
    ends_k: Tensor
    total_q: int
    total_k: int
    sequences: tuple[_Sequence, ...] = field(init=False)

    def __post_init__(self) -> None:
        heads = Sizes()
        for number, terms in enumerate(self.masks):
            with _naming(number, len(self.masks)):
                for term in terms:
                    heads = heads.join(Sizes(num_heads_q=term.sizes.num_heads_q))
        sizes = heads._replace(batch=1, seqlen_q=self.total_q, seqlen_k=self.total_k)
        object.__setattr__(self, "sizes", sizes)
        places = list(self._places())
        found = []
        for number, (terms, rows, keys) in enumerate(places):
            shape = Shape(1, sizes.planes()[1], rows.stop - rows.start, keys.stop - keys.start)
            with _naming(number, len(places)):
                for term in terms:
                    term.check(shape._replace(num_heads_q=term.sizes.num_heads_q or 1))
            if 0 not in shape:
                found.append(_Sequence(rows, keys, shape, *split_terms(terms, shape)))
        object.__setattr__(self, "sequences", tuple(found))

    def _places(self) -> Iterator[tuple[Terms, slice, slice]]:
        """Yield the terms of each sequence's mask, and the slices of its queries and keys."""
        ends = zip(pairwise(self.ends_q.tolist()), pairwise(self.ends_k.tolist()), strict=True)
        for number, (q, k) in enumerate(ends):
            yield self.masks[number % len(self.masks)], slice(*q), slice(*k)

    def values(self) -> tuple[Any, ...]:
        """See `Term.values`."""
        masks = [[(term.name, *term.values()) for term in terms] for terms in self.masks]
        return masks, self.ends_q.clone(), self.ends_k.clone(), self.total_q, self.total_k

    def part(self, batch: slice, heads: slice) -> Term:  # noqa: ARG002 - has one batch entry
        """See `Term.part`."""
        every = slice(None)
        masks = tuple(tuple(term.part(every, heads) for term in terms) for terms in self.masks)
        return replace(self, masks=masks)

    def intervals(self, shape: Shape) -> Intervals | None:
        """See `Term.intervals`."""
        return None if any(one.others for one in self.sequences) else self.hull(shape)

    def hull(self, shape: Shape) -> Intervals:  # noqa: ARG002 - the term knows its sizes
        """See `Term.hull`."""
        lo = torch.zeros((1, self.sizes.planes()[1], self.total_q), dtype=torch.int64, device="cpu")
        hi = torch.zeros_like(lo)
        for one in self.sequences:
            lows, highs = one.intervals
            first = torch.where(lows < highs, one.keys.start, 0)  # a row without a key is (0, 0)
            lo[:, :, one.rows], hi[:, :, one.rows] = lows + first, highs + first
        return lo, hi

    def words(self, part: Part, columns: slice, shape: Shape) -> Tensor:  # noqa: ARG002 - the term knows its sizes
        """See `Term.words`. Sets all bits for a sequence if all its terms have intervals."""
        _, heads, rows = part
        planes = len(range(self.sizes.planes()[1])[heads]) if self.sizes.planes()[1] > 1 else 1
        size = (1, planes, rows.stop - rows.start, columns.stop - columns.start)
        words = torch.full(size, -1, dtype=torch.int64, device="cpu")
        for one in self.sequences:
            begin, end = max(one.rows.start, rows.start), min(one.rows.stop, rows.stop)
            if not one.others or begin >= end:
                continue
            own = slice(begin - one.rows.start, end - one.rows.start)
            shown = _show(one, (slice(0, 1), heads, own))
            words[:, :, begin - rows.start : end - rows.start] = _place(shown, one.keys, columns)
        return words

    def visible(self, shape: Shape) -> Tensor:  # noqa: ARG002 - the term knows its sizes
        """See `Term.visible`."""
        size = (1, self.sizes.planes()[1], self.total_q, self.total_k)
        visible = torch.zeros(size, dtype=torch.bool, device="cpu")
        for terms, rows, keys in self._places():
            shown = visible[:, :, rows, keys]
            if shown.numel() > 0:
                shown.fill_(1)
                own = Shape(1, size[1], *shown.shape[2:])
                for term in terms:
                    shown &= term.visible(own)
        return visible


@contextmanager
def _naming(number: int, count: int) -> Iterator[None]:
    """Prefix the ValueErrors of a sequence's mask with the index of the sequence."""
    try:
        yield
    except ValueError as error:
        message = f"the mask of sequence {number} of {count} does not fit: {error}"
        raise ValueError(message) from error


def _show(one: _Sequence, part: Part) -> Tensor:
    """Return the intersection of a sequence's terms without intervals, for some of its queries.

    The result is booleans [1, heads, rows, keys]. `part` counts from the sequence's first query.
    """
    columns = slice(0, words_of(one.shape.seqlen_k))
    words = torch.full((1, 1, 1, columns.stop), -1, dtype=torch.int64, device="cpu")
    for term in one.others:
        words = words & term.words(part, columns, one.shape)
    return unpack(words, one.shape.seqlen_k)


def _place(shown: Tensor, keys: slice, columns: slice) -> Tensor:
    """Return some columns of the pack's words for booleans [..., keys of one sequence].

    Args:
        shown: The booleans.
        keys: The sequence's keys in the pack.
        columns: The columns of words.
    """
    first, end = columns.start * WORD, columns.stop * WORD
    visible = shown.new_zeros((*shown.shape[:-1], end - first))
    begin, stop = max(keys.start, first), min(keys.stop, end)
    if begin < stop:
        visible[..., begin - first : stop - first] = shown[
            ..., begin - keys.start : stop - keys.start
        ]
    return pack(visible)


def parse_ends(name: str, cu_seqlens: Integers, total: int | None) -> tuple[Tensor, int]:
    """Return cu_seqlens, checked and on the CPU, and the number of tokens of the pack."""
    ends = parse_integers(name, cu_seqlens, ("[sequences + 1]",))
    most = int(ends[-1]) if total is None else total
    if int(ends[0]) != 0 or bool((ends.diff() < 0).any()) or int(ends[-1]) > most:
        message = (
            f"{name} must begin with 0, not decrease and end at most at the {most} tokens of the "
            f"pack, got {ends[:8].tolist()}{', ...' * (len(ends) > 8)} up to {int(ends[-1])}"  # noqa: PLR2004
        )
        raise complain(ValueError, message)
    return ends, most

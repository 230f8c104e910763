"""Masks that say of each pair, or of each pair of blocks, whether it is visible."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .bits import pack, unpack
from .inputs import Shape, Sizes
from .terms import Part, Term

Tensor = torch.Tensor


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
        return _planes(self.bits, part)[:, :, part[2]]

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
        rows = part[2]
        tiles = _planes(self.tiles, part)
        first, end = rows.start // self.block_q, -(-rows.stop // self.block_q)
        columns = torch.arange(shape.seqlen_k, device="cpu") // self.block_k
        words = pack(tiles[:, :, first:end, columns])
        lines = torch.arange(rows.start, rows.stop, device="cpu") // self.block_q
        return words[:, :, lines - first]

    def visible(self, shape: Shape) -> Tensor:
        """See Term."""
        seen = self.tiles.repeat_interleave(self.block_q, 2).repeat_interleave(self.block_k, 3)
        return seen[:, :, : shape.seqlen_q, : shape.seqlen_k]


def _planes(x: Tensor, part: Part) -> Tensor:
    """Return the batch entries and heads of a part; an axis of 1 serves all of them."""
    batch, heads, _ = part
    one = slice(0, 1)
    return x[batch if x.shape[0] > 1 else one, heads if x.shape[1] > 1 else one]

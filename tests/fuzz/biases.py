"""Random biases of scores: broadcasts, dtypes, strides and numbers that hide keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from tests.fuzz.shares import DTYPES
from tests.scores import MASKED

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

Tensor = torch.Tensor
AXES: Final = ("batch", "head", "query", "key")
LOWEST: Final = "lowest"  # of the dtype


@dataclass(frozen=True)
class Bias:
    """A random bias of a call."""

    full: tuple[bool, bool, bool, bool]  # per axis: True if it is not broadcast
    dtype: str
    memory: str  # name in MEMORIES
    size: float  # standard deviation
    hidden: float  # fraction of hidden keys; some rows are hidden as a whole
    hides: str  # the number that hides

    def __str__(self) -> str:
        axes = [axis for axis, full in zip(AXES, self.full, strict=True) if full]
        hides = f", {self.hides} at {self.hidden:.0%}" if self.hidden else ""
        return (
            f"bias per {'/'.join(axes) or 'call'} {self.dtype} {self.memory} {self.size:g}{hides}"
        )

    def make(self, shape: tuple[int, int, int, int], device: str, seed: int) -> Tensor:
        """Return the bias of a call whose scores have this shape."""
        sizes = [n if full else 1 for n, full in zip(shape, self.full, strict=True)]
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(sizes, generator=generator, device=device) * self.size
        x = x.to(DTYPES[self.dtype])
        if self.hidden:
            hidden = torch.rand(sizes, generator=generator, device=device) < self.hidden
            rows = torch.rand(sizes[:3], generator=generator, device=device) < self.hidden / 4
            lowest = torch.finfo(x.dtype).min if self.hides == LOWEST else float(self.hides)
            x = x.masked_fill(hidden | rows[..., None], lowest)
        return MEMORIES[self.memory](x)


def draw_bias(chance: random.Random) -> Bias:
    """Return a random bias."""
    dtype = chance.choice(tuple(DTYPES))
    batch, head, query, key = (chance.random() < share for share in (0.4, 0.6, 0.8, 0.8))
    return Bias(
        (batch, head, query, key),
        dtype,
        chance.choice(tuple(MEMORIES)),
        chance.choice((0.1, 1.0, 4.0)),
        chance.choice((0.0, 0.0, 0.1, 0.4)),
        chance.choice(("-inf", str(MASKED), LOWEST)),
    )


def _contiguous(x: Tensor) -> Tensor:
    return x


def _aligned(x: Tensor) -> Tensor:
    """Return x in memory whose rows begin at multiples of 16 bytes; NaN lies between them."""
    held = x.new_full((*x.shape[:3], (x.shape[3] + 15) // 8 * 8), torch.nan)
    return held[..., : x.shape[3]].copy_(x)


def _odd(x: Tensor) -> Tensor:
    """Return x in memory whose rows begin at odd elements."""
    held = x.new_full((*x.shape[:3], x.shape[3] + 2 | 1), torch.nan)
    return held[..., 1 : x.shape[3] + 1].copy_(x)


def _transposed(x: Tensor) -> Tensor:
    """Return x in memory with the queries last."""
    return x.mT.contiguous().mT


def _heads_last(x: Tensor) -> Tensor:
    """Return x in memory with the heads last."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def _expanded(x: Tensor) -> Tensor:
    """Return x with its first batch entry and head expanded to all, with strides of 0."""
    return x[:1, :1].expand(x.shape)


def _fewer_axes(x: Tensor) -> Tensor:
    """Return x without leading axes of size 1."""
    while x.dim() and x.shape[0] == 1:
        x = x[0]
    return x


MEMORIES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "contiguous": _contiguous,
    "aligned": _aligned,
    "odd": _odd,
    "transposed": _transposed,
    "heads last": _heads_last,
    "expanded": _expanded,
    "fewer axes": _fewer_axes,
}

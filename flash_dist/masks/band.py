"""A band of keys around the diagonal, which kernels compute from left, right and bottom_right."""

from __future__ import annotations

from numbers import Integral
from typing import Final, Literal, NamedTuple, get_args

from ..toolkit.errors import show
from .inputs import complain
from .layout import BAND

Alignment = Literal["bottom_right", "top_left"]

UNBOUNDED: Final = -1
MAX_WINDOW: Final = 2**30 - 1


class Band(NamedTuple):
    """Query i attends to the keys j with i + shift - left <= j <= i + shift + right.

    shift is seqlen_k - seqlen_q if the band is aligned bottom right, and 0 if it is aligned top
    left. A left or right of -1 is unbounded.
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    bottom_right: bool = True

    @classmethod
    def of(cls, left: int | None, right: int | None, alignment: Alignment) -> Band:
        """Return a band, after checking the arguments; None and -1 are unbounded."""
        bottom_right = parse_alignment(alignment)
        left, right = _parse_window("left", left), _parse_window("right", right)
        return cls() if left == right == UNBOUNDED else cls(left, right, bottom_right)

    @property
    def ints(self) -> list[int]:
        """The band as the integers that the operators take, in the order of BAND_INTS."""
        return [BAND, int(self.left), int(self.right), int(self.bottom_right)]

    @property
    def is_full(self) -> bool:
        """True if every query attends to every key."""
        return self.left == self.right == UNBOUNDED

    def intersect(self, other: Band) -> Band:
        """Return the intersection of two bands with the same alignment."""
        left, right = _least(self.left, other.left), _least(self.right, other.right)
        return Band(left, right, self.bottom_right)


def parse_alignment(alignment: str) -> bool:
    """Return whether the alignment is `bottom_right`; raise ValueError for unknown names."""
    if alignment not in get_args(Alignment):
        allowed = " or ".join(f"`{name}`" for name in get_args(Alignment))
        raise complain(ValueError, f"alignment must be {allowed}, got {show(alignment)}")
    return alignment == "bottom_right"


def _parse_window(name: str, size: int | None) -> int:
    if size is None:
        return UNBOUNDED
    if isinstance(size, bool) or not isinstance(size, Integral):
        raise complain(TypeError, f"{name} must be an int or None, got {type(size).__name__}")
    if not UNBOUNDED <= size <= MAX_WINDOW:
        raise complain(
            ValueError,
            f"{name} must be from 0 to {MAX_WINDOW}, or -1 or None for no bound, got {show(size)}",
        )
    return int(size)


def _least(a: int, b: int) -> int:
    """Return the smaller of two window sizes; UNBOUNDED counts as larger than any other size."""
    return max(a, b) if UNBOUNDED in {a, b} else min(a, b)

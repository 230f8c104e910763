"""How much work one file may be, whatever is packed in whatever inside it.

Work is counted and never timed, and the limits follow from the size of the file alone: a file that
is read on one machine is read on all. A small file cannot ask for much, a large one not for more
than a multiple of itself.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from ..errors import LimitError

Work = Literal["bytes", "members", "images", "symbols", "kernels"]

LIBRARY_COST: Final = 10  # in members: one that is opened takes as long as ten that are passed


class Limit(NamedTuple):
    """At least, per byte of the file, and at most; with the most that real files were seen to have.

    Seen were 40 libraries of CUDA 12 and 13, torch, NCCL, cuDNN and cuBLAS, the largest of 1 GB.
    """

    least: int
    per_byte: float
    most: int


LIMITS: Final[dict[Work, Limit]] = {
    "bytes": Limit(64 << 20, 64, 64 << 30),  # seen: 16 per byte, 6 GB with the wheel's own
    "members": Limit(50_000, 1 / 256, 1_000_000),  # seen: 12 500 in a wheel of 600 MB
    "images": Limit(5_000, 1 / 64, 100_000),  # seen: 6 000 in one library
    "symbols": Limit(200_000, 1 / 8, 64_000_000),  # sections and names; seen: 8 million
    "kernels": Limit(20_000, 1 / 64, 500_000),  # seen: 147 000
}
_WORDS: Final[dict[Work, str]] = {
    "bytes": "bytes to unpack",
    "members": "members",
    "images": "images of GPU code",
    "symbols": "sections and symbols",
    "kernels": "kernels",
}


class Budget:
    """What is left for one file and all that is inside it."""

    def __init__(self, size: int) -> None:
        self._limits = {
            work: min(limit.least + int(limit.per_byte * size), limit.most)
            for work, limit in LIMITS.items()
        }
        self._left: dict[Work, int] = dict(self._limits)
        self._size = size
        self._refusal = ""

    def spend(self, work: Work, amount: int = 1) -> None:
        """Count some work.

        Raises:
            LimitError: It is more than a file of this size may ask for.
        """
        left = self._left[work] - amount
        if left < 0 and not self._refusal:
            self._refusal = (
                f"it holds more than {self._limits[work]} {_WORDS[work]}, which is all that is "
                f"read of a file of {self._size} bytes"
            )
        if self._refusal:  # nothing more is read, of whatever kind
            raise LimitError(self._refusal, hint="unpack it, and name the files that it holds")
        self._left[work] = left

    def left(self, work: Work) -> int:
        """Return how much is left."""
        return self._left[work]

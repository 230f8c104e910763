"""Limits the work that a command may do, whatever files it opens and however they are nested.

Work is counted, never timed, and the limits depend only on file sizes: a file that is readable on
one machine is readable on all. Each file has its own allowance, a multiple of its size. All files
of one command also share a fixed allowance, which small files need.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ..errors import LimitError

if TYPE_CHECKING:
    from collections.abc import Iterator

Work = Literal["bytes", "searched", "members", "images", "symbols", "kernels"]

# A library counts as this many members: opening a library takes 0.5 ms, skipping a member 0.02 ms.
LIBRARY_COST: Final = 30


class Limit(NamedTuple):
    """Limits on one kind of work.

    words: What is counted, for messages.
    shared: Allowance that all files of a command share.
    per_byte: A file's allowance per byte of its size.
    most: Maximum for one file, the shared allowance included.

    The largest values in the comments below were measured on 40 libraries of CUDA 12 and 13,
    torch, NCCL, cuDNN and cuBLAS, each of up to 1 GB.
    """

    words: str
    shared: int
    per_byte: float
    most: int


_MEMBERS: Final = f"members (a library counts as {LIBRARY_COST})"
LIMITS: Final[dict[Work, Limit]] = {
    # Largest values measured: 16 times the file's size; 6 GB for a wheel and all its members.
    "bytes": Limit("bytes to unpack", 64 << 20, 64, 64 << 30),
    # Holes in a file do not count. Largest value measured: 6 GB for a wheel and all its members.
    # PTX that is slow to search counts more, see gpucode/cubin.py.
    "searched": Limit("bytes to search", 64 << 20, 64, 32 << 30),
    "members": Limit(_MEMBERS, 50_000, 1 / 256, 1_000_000),  # measured: 12 500 in 600 MB
    "images": Limit("images of GPU code", 5_000, 1 / 64, 50_000),  # measured: 18 000 in cuFFT
    "symbols": Limit("sections and symbols", 200_000, 1 / 8, 64_000_000),  # measured: 8 million
    "kernels": Limit("kernels", 20_000, 1 / 64, 500_000),  # measured: 147 000
}


_SHARED: ContextVar[dict[Work, int] | None] = ContextVar("shared", default=None)


@contextmanager
def one_command() -> Iterator[None]:
    """Let all files that are opened in the block draw on one shared allowance."""
    token = _SHARED.set(_all_shared())
    try:
        yield
    finally:
        _SHARED.reset(token)


def _all_shared() -> dict[Work, int]:
    return {work: min(limit.shared, limit.most) for work, limit in LIMITS.items()}


class Budget:
    """Allowance left for one file and everything in it.

    Args:
        size: The size of the file in bytes.
        name: The name of the file in errors; empty to call the file "it".
    """

    def __init__(self, size: int, name: str = "") -> None:
        self._name = name
        self._own: dict[Work, int] = {
            work: min(int(limit.per_byte * size), max(0, limit.most - limit.shared))
            for work, limit in LIMITS.items()
        }
        self._shared = _SHARED.get() or _all_shared()
        self._first = {work: self.left(work) for work in LIMITS}
        self._alone = self._shared == _all_shared()
        self._size = size
        self._refusal = ""

    def spend(self, work: Work, amount: int = 1) -> None:
        """Count some work.

        Raises:
            LimitError: `amount`, in this or an earlier call, exceeds what is left of both
                allowances together.
        """
        missing = max(0, amount - self._own[work])
        if missing > self._shared[work] and not self._refusal:
            self._refusal = self._refuse(work)
        if self._refusal:  # after a refusal nothing more is read
            step = "unpack it and pass the files that it holds"
            raise LimitError(self._refusal, hint=step if self._alone else "pass it alone")
        self._own[work] -= amount - missing
        self._shared[work] -= missing

    def left(self, work: Work) -> int:
        """Return how much work of a kind is still allowed."""
        return self._own[work] + self._shared[work]

    def _refuse(self, work: Work) -> str:
        which = f"cannot read `{self._name}`: it" if self._name else "it"
        found = f"{which} holds more than {self._first[work]} {LIMITS[work].words}, the limit"
        rest = "" if self._alone else " after the files before it"
        return f"{found} for a file of {self._size} bytes{rest}"

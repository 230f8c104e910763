"""What a case must give by formulas on the CPU, computed once for all GPUs of a host.

Selftests that run side by side share it in a folder of their parent's: nobody else reads it, it
goes with this run, and it is bounded. Whoever needs a case first computes it, and the others wait
for that. The inputs are made on the CPU: a GPU that makes others is found by its own results, and
no other GPU is held against them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from .case import Exact

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .case import Case

LIMIT: Final = 1 << 30  # bytes of all; those of an H200 and the set `all` are 700 MB
_UNREADABLE: Final = (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError)


@dataclass(frozen=True)
class ExactValues:
    """What cases must give; computed here where there is no folder, or where it fails."""

    folder: Path | None = None
    limit: int = LIMIT

    def get(self, case: Case) -> Exact:
        """Compute what a case must give, or read what another process computed."""
        if self.folder is None:
            return case.compute_exact()
        path = self.folder / f"{hashlib.sha256(case.name.encode()).hexdigest()}.pt"
        with _turn(path.with_suffix(".lock")):
            found = _read(path)
            if found is None:
                found = case.compute_exact()
                self._write(path, found)
        return found

    def _write(self, path: Path, exact: Exact) -> None:
        """Keep it for the others where there is room; each sees all of it or nothing."""
        size = sum(values.numel() * values.element_size() for values in exact.values.values())
        part = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError, RuntimeError):  # a full disk, as torch tells it
            if size + sum(one.stat().st_size for one in path.parent.glob("*.pt")) <= self.limit:
                torch.save({"values": exact.values, "allowed": exact.allowed}, part)
                part.replace(path)
        part.unlink(missing_ok=True)


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Let one process in at a time; one that dies lets the next in."""
    try:
        file = lock.open("wb")
    except OSError:  # then each computes for itself
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Exact | None:
    """Return what is there; None where nothing is, or nothing whole."""
    try:
        data: dict[str, Any] = torch.load(path, weights_only=True)
        return Exact(data["values"], data["allowed"])
    except _UNREADABLE:
        return None

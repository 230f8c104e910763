"""Computes the expected values of cases on the CPU, once for all GPUs of a host.

Parallel selftests share the values in a private folder of their parent process. The folder has a
maximum size and is deleted at the end of the run. The first process that needs a case computes it,
and the others wait. The values follow from inputs that the CPU makes. So if a GPU makes different
inputs, only its own selftest fails.
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

LIMIT: Final = 1 << 30  # maximum bytes in the folder; an H200 with the arch set `all` needs 700 MB
_UNREADABLE: Final = (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError)


@dataclass(frozen=True)
class ExactValues:
    """The expected values of cases; computed locally if there is no usable folder."""

    folder: Path | None = None
    limit: int = LIMIT  # maximum bytes in the folder

    def get(self, case: Case) -> Exact:
        """Return the expected values of a case: read from the folder, or else computed here."""
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
        """Store the values if there is room; other processes see a complete file or none."""
        size = sum(values.numel() * values.element_size() for values in exact.values.values())
        part = path.with_suffix(f".{os.getpid()}")
        with suppress(OSError, RuntimeError):  # RuntimeError: torch's error for a full disk
            if size + sum(one.stat().st_size for one in path.parent.glob("*.pt")) <= self.limit:
                torch.save({"values": exact.values, "allowed": exact.allowed}, part)
                part.replace(path)
        part.unlink(missing_ok=True)


@contextmanager
def _turn(lock: Path) -> Iterator[None]:
    """Hold a file lock, which only one process can hold; a process that dies releases the lock."""
    try:
        file = lock.open("wb")
    except OSError:  # each process then computes the values
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> Exact | None:
    """Return the stored values; None if there are none, or they are incomplete."""
    try:
        data: dict[str, Any] = torch.load(path, weights_only=True)
        return Exact(data["values"], data["allowed"])
    except _UNREADABLE:
        return None

"""Every finding id as data: its meaning and its remedy.

To add an id, add an entry to the module of its subject, and import it where it is found. `explain
ID`, the HTML report, the hint after a fix and the page `findings.html` of the documentation follow.
Entries of the package's own variables come from product.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import audits, driver, gpus, host, install, libraries, loading, proofs, verifications
from .entry import Entry
from .said import (
    attention,
    building,
    faults,
    frameworks,
    gpu_code,
    installing,
    linking,
    own,
    packages,
    starting,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["FINDINGS", "SUBJECTS", "Entry", "find", "find_code"]


def _entries_of(module: ModuleType) -> dict[str, Entry]:
    values = vars(module).values()
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return {one.id: one for value in several for one in value if isinstance(one, Entry)}


SUBJECTS: Final[tuple[tuple[str, Mapping[str, Entry]], ...]] = (
    ("This package", _entries_of(own)),
    ("The install", _entries_of(install)),
    ("Loading", _entries_of(loading)),
    ("The driver and its variables", _entries_of(driver)),
    ("Containers, WSL, MIG, hidden GPUs and the JIT's cache", _entries_of(host)),
    ("GPUs and this build", _entries_of(gpus)),
    ("Other libraries", _entries_of(libraries)),
    ("The selftest", _entries_of(proofs)),
    ("Audits", _entries_of(audits)),
    ("Verifications", _entries_of(verifications)),
    ("CUDA that does not start", _entries_of(starting)),
    ("GPU code that does not run", _entries_of(gpu_code)),
    ("Calls that fail on the GPU", _entries_of(faults)),
    ("Attention of any package", _entries_of(attention)),
    ("torch, Triton and CUDA's libraries", _entries_of(frameworks)),
    ("The dynamic loader", _entries_of(linking)),
    ("Missing packages", _entries_of(packages)),
    ("Compiling packages", _entries_of(building)),
    ("pip, uv and conda", _entries_of(installing)),
)

FINDINGS: Final[Mapping[str, Entry]] = {
    name: entry for _, entries in SUBJECTS for name, entry in entries.items()
}

_OF_CODES: Final[Mapping[int, Entry]] = {
    code: entry for entry in FINDINGS.values() for code in entry.codes
}


def find_code(number: int) -> Entry:
    """Return the entry of a CUDA error code; the general entry if no other has it."""
    return _OF_CODES.get(number, faults.CUDA_ERROR)


def find(name: str) -> Entry | None:
    """Return the entry of an id, None if there is no such id."""
    return FINDINGS.get(name)

"""Every finding id as data: what it means, and what to do.

A new id is one entry in the module of its subject, and the code that finds it imports it from
there; nothing else. `explain ID`, the HTML report, the hint after a fix and the page
`findings.html` of the documentation follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import (
    audits,
    building,
    driver,
    gpus,
    host,
    install,
    libraries,
    loading,
    messages,
    proofs,
    verifications,
)
from .entry import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["FINDINGS", "SUBJECTS", "Entry", "find"]


def _entries_of(module: ModuleType) -> dict[str, Entry]:
    return {entry.id: entry for entry in vars(module).values() if isinstance(entry, Entry)}


SUBJECTS: Final[tuple[tuple[str, Mapping[str, Entry]], ...]] = (
    ("The install", _entries_of(install)),
    ("Loading", _entries_of(loading)),
    ("The driver and its variables", _entries_of(driver)),
    ("Containers, WSL, MIG, hidden GPUs and the JIT's cache", _entries_of(host)),
    ("GPUs and this build", _entries_of(gpus)),
    ("Libraries of others", _entries_of(libraries)),
    ("The selftest", _entries_of(proofs)),
    ("Audits", _entries_of(audits)),
    ("Verifications", _entries_of(verifications)),
    ("GPU code and calls that fail", _entries_of(messages)),
    ("Packages that are built or installed", _entries_of(building)),
)

FINDINGS: Final[Mapping[str, Entry]] = {
    name: entry for _, entries in SUBJECTS for name, entry in entries.items()
}


def find(name: str) -> Entry | None:
    """Return what an id stands for, None if there is no such id."""
    return FINDINGS.get(name)

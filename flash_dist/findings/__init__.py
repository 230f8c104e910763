"""Every finding id as data: what it means, and what to do.

A new id is one entry in the module of its subject, and nothing else: `doctor --explain ID`, the
HTML report, the hint after a fix and the page `findings.html` of the documentation take it from
there. A unit test holds the entries against the ids in the source.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from .audits import AUDITS
from .driver import DRIVER
from .entry import Entry
from .gpus import GPUS
from .host import HOST
from .install import INSTALL
from .libraries import LIBRARIES
from .loading import LOADING
from .messages import MESSAGES
from .proofs import PROOFS
from .verifications import VERIFICATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FINDINGS", "SUBJECTS", "Entry", "find", "hint_for", "page_of", "suggest"]

SUBJECTS: Final[tuple[tuple[str, Mapping[str, Entry]], ...]] = (
    ("The install", INSTALL),
    ("Loading", LOADING),
    ("The driver and its variables", DRIVER),
    ("Containers, WSL, MIG, hidden GPUs and the JIT's cache", HOST),
    ("GPUs and this build", GPUS),
    ("Libraries of others", LIBRARIES),
    ("The selftest", PROOFS),
    ("Audits", AUDITS),
    ("Verifications", VERIFICATIONS),
    ("Error messages", MESSAGES),
)

FINDINGS: Final[Mapping[str, Entry]] = {
    name: entry for _, entries in SUBJECTS for name, entry in entries.items()
}


def find(name: str) -> Entry | None:
    """Return what an id stands for, None if there is no such id."""
    return FINDINGS.get(name)


def page_of(name: str) -> str | None:
    """Return where the documentation explains an id, relative to its first page."""
    return f"findings.html#{name}" if name in FINDINGS else None


def hint_for(name: str) -> str:
    """Name the command that says more of an id; empty if there is no such id."""
    return f"(more: `doctor --explain {name}`)" if name in FINDINGS else ""


def suggest(text: str) -> str | None:
    """Return the id that was most likely meant, None if nothing comes near."""
    return next(iter(difflib.get_close_matches(text, FINDINGS, n=1, cutoff=0.75)), None)

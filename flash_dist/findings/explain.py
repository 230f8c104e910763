"""What an error message about GPU code, or the id of a finding, means, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..binaries.demangle import demangle
from . import FINDINGS, find, page_of

if TYPE_CHECKING:
    import re

    from .entry import Entry


@dataclass(frozen=True)
class Explanation:
    """What happened, why, and the steps that help, the surest first."""

    id: str
    summary: str
    details: tuple[str, ...]
    steps: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        return {
            "version": 1,
            "id": self.id,
            "summary": self.summary,
            "details": list(self.details),
            "steps": list(self.steps),
            "docs": page_of(self.id),
        }


def explain(message: str) -> Explanation | None:
    """Return what is known of a message, or of the id of a finding; None if nothing is."""
    name = message.strip()
    entry = find(name)
    if entry is not None:
        return Explanation(name, entry.title, (entry.meaning,), (entry.remedy,))
    for name, entry in FINDINGS.items():
        match = entry.match(message)
        if match is not None:
            return Explanation(name, _say(entry, match), (entry.meaning,), (entry.remedy,))
    return None


def _say(entry: Entry, match: re.Match[str]) -> str:
    """Sum up what a message says itself, its symbols as their source has them."""
    found = {name: demangle(text) for name, text in match.groupdict().items()}
    return entry.said.format(**found) or entry.title

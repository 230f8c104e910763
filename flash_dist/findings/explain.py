"""What an error message about GPU code, or the id of a finding, means, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..binaries.demangle import demangle
from . import FINDINGS, find

if TYPE_CHECKING:
    import re

    from .entry import Entry


@dataclass(frozen=True)
class Explanation:
    """An entry, and what it is called here: what a message says comes before its title."""

    entry: Entry
    summary: str

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        return {
            "version": 1,
            "id": self.entry.id,
            "summary": self.summary,
            "details": [self.entry.meaning],
            "steps": [self.entry.remedy],
            "docs": self.entry.page,
        }


def explain(message: str) -> Explanation | None:
    """Return what is known of a message, or of the id of a finding; None if nothing is."""
    named = find(message.strip())
    if named is not None:
        return Explanation(named, named.title)
    for entry in FINDINGS.values():
        match = entry.match(message)
        if match is not None:
            return Explanation(entry, _say(entry, match))
    return None


def _say(entry: Entry, match: re.Match[str]) -> str:
    """Sum up what a message says itself, its symbols as their source has them."""
    found = {name: demangle(text) for name, text in match.groupdict().items()}
    return entry.said.format(**found) or entry.title

"""What one finding id stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """An id in words: one line, what it means, and what to do.

    Args:
        id: Names the cause for programs; stable.
        title: One line.
        meaning: A few sentences.
        remedy: A few sentences.
        pattern: A regular expression for the error messages that this explains; empty for none.
        said: The title for such a message, with what the named groups of `pattern` found in it.
    """

    id: str
    title: str
    meaning: str
    remedy: str
    pattern: str = ""
    said: str = ""

    @property
    def page(self) -> str:
        """Where the documentation explains it, relative to its first page."""
        return f"findings.html#{self.id}"

    @property
    def command(self) -> str:
        """What says more of it."""
        return f"explain {self.id}"

    def match(self, message: str) -> re.Match[str] | None:
        """Look for the error that this explains in a message."""
        return re.search(self.pattern, message) if self.pattern else None

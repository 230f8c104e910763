"""What one finding id stands for."""

from __future__ import annotations

from dataclasses import dataclass

from ..product import PROGRAM


@dataclass(frozen=True)
class Entry:
    """An id in words: one line, what it means, and what to do.

    Args:
        id: Names the cause for programs; stable.
        title: One line.
        meaning: A few sentences.
        remedy: A few sentences.
        messages: Parts of the error messages that this explains, in their own words: `{symbol}`
            stands for what differs from case to case (see phrases.py).
        codes: Errors of CUDA that this explains, in any way of writing them (see codes.py).
        said: The title for such a message, with what stood in those places: of a code its
            {number}, {name} and {text}.
    """

    id: str
    title: str
    meaning: str
    remedy: str
    messages: tuple[str, ...] = ()
    said: str = ""
    codes: tuple[int, ...] = ()

    @property
    def page(self) -> str:
        """Where the documentation explains it, relative to its first page."""
        return f"findings.html#{self.id}"

    @property
    def command(self) -> str:
        """What says more of it."""
        return f"{PROGRAM} explain {self.id}"

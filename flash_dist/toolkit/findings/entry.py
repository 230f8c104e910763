"""The meaning and the remedy of one finding id."""

from __future__ import annotations

from dataclasses import dataclass

from ..product import PROGRAM


@dataclass(frozen=True)
class Entry:
    """Description of an id: title, meaning and remedy.

    Args:
        title: One line.
        meaning: A few sentences.
        remedy: A few sentences.
        messages: Parts of the error messages that the entry explains; `{symbol}` is a variable part
            (see phrases.py).
        codes: CUDA errors that the entry explains, in any spelling (see codes.py).
        said: Title for a message that the entry explains. It may contain the message's variable
            parts; for an error code these are {number}, {name} and {text}.
        id: Stable name of the cause, for programs: the name of the entry's constant.
    """

    title: str
    meaning: str
    remedy: str
    messages: tuple[str, ...] = ()
    said: str = ""
    codes: tuple[int, ...] = ()
    id: str = ""

    @property
    def page(self) -> str:
        """The page of the id in the documentation, relative to the first page."""
        return f"findings.html#{self.id}"

    @property
    def command(self) -> str:
        """The command that explains the id."""
        return f"{PROGRAM} explain {self.id}"

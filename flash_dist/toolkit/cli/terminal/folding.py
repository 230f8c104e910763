"""Sentences in lines of a terminal: broken between words, and never inside of a command."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Final

from rich.text import Text

from .text import printable

if TYPE_CHECKING:
    from rich.console import Console

_CODE: Final = re.compile(r"`[^`\n]+`")
_WHOLE: Final = re.compile(r"\(more: `[^`\n]+`\)|`[^`\n]+`")
_FIX: Final = re.compile(r" *(fix:|hint:)")
_NO_BREAK: Final = "\0"  # in place of a command's blanks while lines are broken
NARROWEST: Final = 40


def fold(text: str, width: int | None, *, indent: int = 0, hang: int = 2) -> list[str]:
    """Break a text into lines, the second indented by `hang` more; without a width it stays one.

    What stands in backticks is left whole and runs over the edge if it must: a terminal goes on in
    the next row by itself, and what is copied there is one line.
    """
    if width is None:
        return [" " * indent + text]
    own = len(text) - len(text.lstrip())
    whole = _WHOLE.sub(lambda match: match[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.wrap(
        whole,
        max(width - indent, NARROWEST),
        subsequent_indent=" " * (own + hang),
        drop_whitespace=True,
        replace_whitespace=False,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [" " * indent + line.replace(_NO_BREAK, " ") for line in lines or [""]]


def width_of(console: Console) -> int | None:
    """Return how wide lines may be; in a pipe nothing is broken."""
    return console.width if console.is_terminal else None


def paint(line: str, *, fix: bool = False) -> Text:
    """Return a line to print; of what to do the word and the commands are coloured."""
    text = Text(printable(line))
    if fix:
        word = _FIX.match(text.plain)
        if word:
            text.stylize("bold", *word.span(1))
        text.highlight_regex(_CODE, "cyan")
    return text


def print_line(console: Console, text: str, *, hang: int = 2) -> None:
    """Print a sentence; one that says what to do is coloured."""
    fix = _FIX.match(text) is not None
    for line in fold(printable(text), width_of(console), hang=hang):
        console.print(paint(line, fix=fix), soft_wrap=True)

"""Wraps sentences for a terminal, between words and never within a command."""

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
_NO_BREAK: Final = "\0"  # replaces a command's spaces during wrapping
NARROWEST: Final = 40  # minimum width of wrapped text


def fold(text: str, width: int | None, *, indent: int = 0, hang: int = 2) -> list[str]:
    """Break a text into lines; all lines but the first are indented by `hang` more columns.

    Without a width, the text stays one line.

    Text in backticks is not broken and may exceed the width: the terminal wraps it visually, and it
    is copied as one line.
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
    """Return the width of lines on a terminal; None for a pipe or file."""
    return console.width if console.is_terminal else None


def paint(line: str, *, fix: bool = False) -> Text:
    """Return a line to print; if `fix` is true, with a bold `fix:` or `hint:` and coloured code."""
    text = Text(printable(line))
    if fix:
        word = _FIX.match(text.plain)
        if word:
            text.stylize("bold", *word.span(1))
        text.highlight_regex(_CODE, "cyan")
    return text


def print_line(console: Console, text: str, *, hang: int = 2) -> None:
    """Print a sentence, wrapped on a terminal, and coloured if it starts with `fix:` or `hint:`."""
    fix = _FIX.match(text) is not None
    for line in fold(printable(text), width_of(console), hang=hang):
        console.print(paint(line, fix=fix), soft_wrap=True)

"""Builds HTML from strings and Markup: each string that is not Markup is escaped."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CODE: Final = re.compile(r"`([^`\n]+)`")
_SHORT: Final = 30  # characters of a word that fit in one line on a phone


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Escape special characters of HTML, and characters that are not printable."""
    shown = "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )
    return Markup(html.escape(shown))


def element(name: str, *children: str, **attributes: str) -> Markup:
    """Return an element. Children that are not Markup are escaped; `_class` becomes `class`."""
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*parts: str) -> Markup:
    """Concatenate markup and texts."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def make_head(title: str, style: str, *more: Markup) -> Markup:
    """Return the head of a self-contained page."""
    return element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        *more,
        element("title", title),
        element("style", Markup(style)),
    )


def prose(text: str) -> Markup:
    """Return a sentence with code elements for the words in backticks."""
    parts = _CODE.split(text)  # parts at odd indexes are inside backticks
    return join(*(_code(part) if place % 2 else part for place, part in enumerate(parts)))


def _code(text: str) -> Markup:
    """Write code without line breaks after the dashes of options."""
    words = re.split("( )", text)
    return element(
        "code",
        *(
            element("span", word, _class="whole") if "-" in word and len(word) <= _SHORT else word
            for word in words
        ),
    )


def make_table(
    title: str, heads: Iterable[str], rows: Iterable[tuple[str, Sequence[str]]], *, style: str = ""
) -> Markup:
    """Return a table that scrolls separately if it is wider than the page.

    Args:
        title: The name of the table for screen readers.
        heads: Heads of the columns.
        rows: Head and cells of each row.
        style: Class of the rows' heads.
    """
    columns = (element("th", head, scope="col") for head in heads)
    body = (
        element(
            "tr",
            element("th", head, scope="row", _class=style),
            *(element("td", cell) for cell in cells),
        )
        for head, cells in rows
    )
    table = element("table", element("thead", element("tr", *columns)), element("tbody", *body))
    return element("div", table, _class="scroll", role="region", aria_label=title, tabindex="0")

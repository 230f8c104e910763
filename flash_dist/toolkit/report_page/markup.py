"""HTML that is escaped by construction: a text becomes markup only through `element`."""

from __future__ import annotations

import html
import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_CODE: Final = re.compile(r"`([^`\n]+)`")
_SHORT: Final = 30  # characters of a word that a phone has room for in one line


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def escape(text: str) -> Markup:
    """Write a text that may hold anything, such as the name of a file, as itself."""
    shown = "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )
    return Markup(html.escape(shown))


def element(name: str, *children: str, **attributes: str) -> Markup:
    """Return an element. Children that are no Markup are escaped; `_class` is written `class`."""
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*parts: str) -> Markup:
    """Put markup and texts one after the other."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def make_head(title: str, style: str, *more: Markup) -> Markup:
    """Return the head of a page that is complete in itself."""
    return element(
        "head",
        Markup('<meta charset="utf-8">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        *more,
        element("title", title),
        element("style", Markup(style)),
    )


def prose(text: str) -> Markup:
    """Return a sentence whose words in backticks are code."""
    parts = _CODE.split(text)  # the odd ones stood in backticks
    return join(*(_code(part) if place % 2 else part for place, part in enumerate(parts)))


def _code(text: str) -> Markup:
    """Write code whose options do not break after their dashes."""
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
    """Return a table that scrolls in itself where it is wider than the page.

    Args:
        title: What a screen reader calls it.
        heads: Of the columns.
        rows: The head of each, and its cells.
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

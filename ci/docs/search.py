"""Write the index of the site's search: the text of each section, which MiniSearch reads.

Sphinx's own search treats a page as one set of words: it drops numbers and `no`, ignores which
words are adjacent, and sorts pages with equal scores by title.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

INDEX: Final = "_static/search-index.js"
NOT_TEXTS: Final = frozenset({"genindex.html", "search.html"})
BLOCKS: Final = frozenset({"br", "dd", "div", "dt", "li", "p", "pre", "section", "td", "th", "tr"})
VOID: Final = frozenset({"br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"})
HEADINGS: Final = frozenset({"h1", "h2", "h3", "h4"})
# Classes of elements that the index omits: link marks of headings, JSON schemas, parentheses.
SKIPPED: Final = frozenset({"headerlink", "highlight-json", "sig-paren"})


@dataclass
class Section:
    """A heading with the text up to the next heading."""

    id: str
    title: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


class Sections(HTMLParser):
    """The sections of a page, in order of their headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[Section] = []
        self._open: list[tuple[str, Section | None]] = []  # open elements and their sections
        self._skipped = 0  # number of open omitted elements
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Enter an element."""
        self._break(tag)
        if tag in VOID:
            return
        values = {name: value or "" for name, value in attrs}
        section = Section(values.get("id", "")) if tag == "section" else None
        if section is not None:
            self.found.append(section)
        self._open.append((tag, section))
        unwanted = tag in {"script", "style"} or SKIPPED & {*values.get("class", "").split()}
        self._skipped += bool(self._skipped or unwanted)

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        self._break(tag)
        if tag not in VOID:
            self._open.pop()
            self._skipped -= bool(self._skipped)

    def handle_data(self, data: str) -> None:
        """Keep text that belongs to a section."""
        section = next((one for _, one in reversed(self._open) if one is not None), None)
        if section is not None and not self._skipped:
            heading = any(tag in HEADINGS for tag, _ in self._open)
            (section.title if heading else section.text).append(data)

    def _break(self, tag: str) -> None:
        if tag in BLOCKS:
            self.handle_data(" ")


def read_sections(html: str) -> Iterator[tuple[str, str, str]]:
    """Yield the id, the title and the text of each section of a page."""
    for section in Sections(html).found:
        title, text = (
            re.sub(r"\s+", " ", "".join(parts)).strip() for parts in (section.title, section.text)
        )
        yield section.id, title, text


def list_sections(site: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield the address, the page's title, the title and the text of each section of the site."""
    for path in sorted(site.rglob("*.html")):
        name = path.relative_to(site).as_posix()
        if name in NOT_TEXTS or name.startswith("_"):
            continue
        sections = list(read_sections(path.read_text(encoding="utf-8")))
        for number, (anchor, title, text) in enumerate(sections):
            address = f"{name}#{anchor}" if number else name
            yield address, sections[0][1], title, text


def write_index(site: Path) -> None:
    """Write the sections as a script, because a page opened from disk cannot load JSON."""
    sections = json.dumps(list(list_sections(site)), ensure_ascii=False, separators=(",", ":"))
    (site / INDEX).write_text(f"const SECTIONS = {sections};\n", encoding="utf-8")

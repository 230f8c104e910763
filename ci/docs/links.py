"""Check the links of the built site, the titles of its pages, and that it needs no network."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from flash_dist.toolkit.findings import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROJECT: Final = "flash_dist"  # the title of the site in docs/conf.py


class Links(HTMLParser):
    """Links of a page, the files that it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.title = ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record links, loaded files and anchors of an element."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in {"link", "script", "img", "iframe", "source"}:
            self.loaded += [values[name] for name in ("href", "src") if name in values]
        self._in_title = tag == "title" and not self.title  # later titles are of icons

    def handle_data(self, data: str) -> None:
        """Keep the title of the page, without the site's suffix."""
        if self._in_title:
            self.title = data.strip().removesuffix(f" - {PROJECT}")
            self._in_title = False


def check_site(out: Path) -> Iterator[str]:
    """Yield broken links, content from the network, and findings without a place."""
    pages = {
        path.resolve(): Links(path.read_text(encoding="utf-8"))
        for path in sorted(out.rglob("*.html"))
    }
    titled: dict[str, Path] = {}
    for path, page in pages.items():
        where = path.relative_to(out.resolve())
        if page.title and titled.setdefault(page.title, where) != where:
            yield f"{where} is titled `{page.title}` as {titled[page.title]} is"
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{where} loads {link}"
        for link in (*page.links, *page.loaded):
            problem = check_link(path, link, pages)
            if problem:
                yield f"{where} links to {link}, {problem}"
    findings = pages[(out / "findings.html").resolve()]
    for _, entries in SUBJECTS:
        yield from (
            f"findings.html has no place for {name}" for name in entries.keys() - findings.ids
        )


def check_link(page: Path, link: str, pages: dict[Path, Links]) -> str:
    """Describe what is wrong with an internal link; ignore external ones."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_file():
        return "which is no file"
    known = pages.get(target)
    if parts.fragment and known is not None and unquote(parts.fragment) not in known.ids:
        return "which has no such place"
    return ""

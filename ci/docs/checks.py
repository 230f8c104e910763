"""Check the built site: links, titles of pages, and that no page loads a file from the network.

Check widths, search and copy buttons in headless Chromium.
"""

from __future__ import annotations

import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from flash_dist.toolkit.findings import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Page

PROJECT: Final = "flash_dist"  # the title of the site in docs/conf.py

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NOT_CHECKED: Final = (
    "no Chromium is installed, so widths, search and copy buttons of the site were not checked; "
    "`apt-get install chromium` installs it"
)
WIDTHS: Final = (420, 1280, 1920)  # window widths in pixels: a phone, a laptop, a desktop
HEIGHT: Final = 1000
PATIENCE: Final = 180_000  # milliseconds to wait: a busy machine starts a browser slowly
MEASURE: Final = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")
# Each query, and the start of an address that its first results must include.
QUERIES: Final = {
    "no kernel image": "findings/",
    "RTX 3090": "docs/install.html",
    "flash_attn_func": "api.html",
}
FIRST: Final = 3
# Record copied text: a page opened from a file cannot read the clipboard.
LISTEN: Final = """() => document.addEventListener("copy", () => {
  window.copied = document.activeElement.value ?? String(getSelection());
})"""
CONSOLE: Final = "div.highlight-console:has(.go)"  # console blocks that show output


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
        self._in_title = tag == "title" and not self.title  # later titles are of SVG icons

    def handle_data(self, data: str) -> None:
        """Keep the title of the page, without the site's suffix."""
        if self._in_title:
            self.title = data.strip().removesuffix(f" - {PROJECT}")
            self._in_title = False


def check_site(out: Path) -> Iterator[str]:
    """Yield broken links, content loaded from the network, and findings without a page."""
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
    """Describe what is wrong with an internal link; ignore external links."""
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


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def check_pages(site: Path, chromium: str) -> Iterator[str]:
    """Yield a sentence for each cut-off page, each failed query and each bad copy button."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - installed by `nox -s docs`

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, timeout=PATIENCE)
        try:
            page = browser.new_page()
            page.set_default_timeout(PATIENCE)
            for path in sorted(site.rglob("*.html")):
                page.goto(path.as_uri())
                name = path.relative_to(site).as_posix()
                yield from (f"{name} {problem}" for problem in check_page(page))
            yield from check_search(page, site)
        finally:
            browser.close()


def check_page(page: Page) -> Iterator[str]:
    """Check the open page at every width, and the copy button of a block."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": HEIGHT})
        yield from (f"at {width} px: {problem}" for problem in page.evaluate(MEASURE))
    blocks = page.query_selector_all(CONSOLE)
    if blocks:
        page.evaluate(LISTEN)
        block = blocks[0]
        block.hover()
        block.query_selector("button.copybtn").click()
        yield from check_copied(block.inner_text(), page.evaluate("window.copied ?? ''"))


def check_copied(shown: str, copied: str) -> Iterator[str]:
    """Check that a copy button copies the commands of a block, without prompt and output."""
    typed: list[str] = []
    for line in shown.splitlines():
        if line.startswith("$ ") or (typed and typed[-1].endswith("\\")):
            typed.append(line.removeprefix("$ "))
    if copied.splitlines() != typed:
        yield f"copies {copied!r} of a block whose commands are {typed}"


def check_search(page: Page, site: Path) -> Iterator[str]:
    """Check that the first results of each query include the expected page."""
    for query, wanted in QUERIES.items():
        page.goto(f"{(site / 'search.html').as_uri()}?q={query}")
        links = page.eval_on_selector_all("ul.search a", "all => all.map((a) => a.href)")
        first = [link.removeprefix(f"{site.as_uri()}/") for link in links[:FIRST]]
        if not any(link.startswith(wanted) for link in first):
            yield f"search.html finds {first} for `{query}` before {wanted}"

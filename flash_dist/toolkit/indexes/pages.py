"""Parses pages of package indexes: PEP 503 (HTML), PEP 691 (JSON) and plain lists of files.

Pages are not trusted: only http and https addresses are links. Only pages on this machine may link
to its files.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from html.parser import HTMLParser
from itertools import islice
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urldefrag, urljoin, urlsplit

from ..errors import FetchError
from ..product import NAME, SCRIPT
from .digests import choose_digest, parse_digest
from .fetch import last_part

if TYPE_CHECKING:
    from collections.abc import Iterator

API_VERSION: Final = 1  # supported major version (PEP 629, 691)
_CHUNK: Final = 1 << 16
MAX_LINKS: Final = 50_000  # per page; the longest page of a project on PyPI has some 10,000


@dataclass(frozen=True)
class Link:
    """One link of a page."""

    url: str  # without a fragment
    digest: str = ""  # such as `sha256=<hex>`; empty if unknown
    requires_python: str = ""  # such as `>=3.10`; empty if unknown
    size: int | None = None  # bytes; None: unknown
    yanked: bool = False

    @cached_property
    def file_name(self) -> str:
        """The last part of the path, decoded; for a folder, its name."""
        return last_part(self.url)


def parse_page(text: str, url: str) -> tuple[Link, ...]:
    """Return the links of a page, in order.

    Raises:
        FetchError: The page begins as JSON but cannot be parsed, has another API version, or has
            more than MAX_LINKS links.
    """
    found = _parse_json(text, url) if text.lstrip().startswith("{") else _parse_html(text, url)
    allowed = {"http", "https", *(["file"] if urlsplit(url).scheme == "file" else [])}
    links = tuple(islice(found, MAX_LINKS + 1))
    if len(links) > MAX_LINKS:
        message = f"cannot read the index `{url}`: it has more than {MAX_LINKS} links"
        raise FetchError(message, hint=f"name the page of the project, such as `.../{SCRIPT}/`")
    return tuple(link for link in links if link.url.partition(":")[0].lower() in allowed)


def _require_api(version: object, url: str) -> None:
    """Reject a page whose major API version is not API_VERSION."""
    major = str(version).partition(".")[0]
    if major != str(API_VERSION):
        message = f"cannot read the index `{url}`: it is of API version {version!s:.20}, this reads"
        message += f" version {API_VERSION}"
        raise FetchError(message, hint=f"a newer {NAME} may read it; a folder of wheels will do")


class _Anchors(HTMLParser):
    """Collects link attributes, and the address that they are relative to."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.version = ""
        self.found: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "base":
            self.base = self.base or given.get("href", "")
        elif tag == "meta" and given.get("name") == "pypi:repository-version":
            self.version = given.get("content", "")
        elif tag == "a" and given.get("href"):
            self.found.append(given)


def _parse_html(text: str, url: str) -> Iterator[Link]:
    parser = _Anchors()
    for start in range(0, len(text), _CHUNK):
        parser.feed(text[start : start + _CHUNK])
        if len(parser.found) > MAX_LINKS:
            break
    if parser.version:
        _require_api(parser.version, url)
    base = _join(url, parser.base) or url
    for given in parser.found:
        target, fragment = urldefrag(_join(base, given["href"]))
        if target:
            yield Link(
                target,
                parse_digest(fragment),
                given.get("data-requires-python", ""),
                yanked="data-yanked" in given,
            )


def _parse_json(text: str, url: str) -> Iterator[Link]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"cannot read the index `{url}`: {error}"
        raise FetchError(message, hint="name a simple index (PEP 503 or 691)") from error
    meta = data.get("meta")
    if isinstance(meta, dict) and "api-version" in meta:
        _require_api(meta["api-version"], url)
    for project in _objects(data, "projects"):
        target = _join(url, f"{project.get('name', '')}/")
        if project.get("name") and target:
            yield Link(target)
    for file in _objects(data, "files"):
        target, _ = urldefrag(_join(url, str(file.get("url", ""))))
        hashes, size = file.get("hashes"), file.get("size")
        if target:
            yield Link(
                target,
                choose_digest(hashes) if isinstance(hashes, dict) else "",
                str(file.get("requires-python") or ""),
                size if isinstance(size, int) and size > 0 else None,
                bool(file.get("yanked")),
            )


def _objects(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = data.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _join(base: str, target: str) -> str:
    """Return the absolute address of a link, empty if it is malformed."""
    try:
        return urljoin(base, target)
    except ValueError:  # such as `http://[`
        return ""

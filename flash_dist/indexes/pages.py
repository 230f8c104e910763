"""The pages of package indexes: PEP 503 (HTML), PEP 691 (JSON) and plain lists of files.

Nothing on a page is trusted: an address that is not http or https is no link. Files of this machine
are linked to by pages of this machine alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag, urljoin, urlsplit

from ..errors import FetchError
from .fetch import last_part

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Link:
    """One link of a page."""

    url: str  # without a fragment
    sha256: str = ""
    requires_python: str = ""
    size: int | None = None
    yanked: bool = False

    @property
    def file_name(self) -> str:
        """The last part of the path, decoded; of a folder that of the folder."""
        return last_part(self.url)


def parse_page(text: str, url: str) -> tuple[Link, ...]:
    """Return the links of a page in its order.

    Raises:
        FetchError: It says that it is JSON, and is not what PEP 691 describes.
    """
    found = _parse_json(text, url) if text.lstrip().startswith("{") else _parse_html(text, url)
    allowed = {"http", "https", *(["file"] if urlsplit(url).scheme == "file" else [])}
    return tuple(link for link in found if urlsplit(link.url).scheme in allowed)


class _Anchors(HTMLParser):
    """Collects the attributes of links, and the address that they are relative to."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.found: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "base":
            self.base = self.base or given.get("href", "")
        elif tag == "a" and given.get("href"):
            self.found.append(given)


def _parse_html(text: str, url: str) -> Iterator[Link]:
    parser = _Anchors()
    parser.feed(text)
    base = _join(url, parser.base) or url
    for given in parser.found:
        target, fragment = urldefrag(_join(base, given["href"]))
        if target:
            yield Link(
                target,
                fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else "",
                given.get("data-requires-python", ""),
                yanked="data-yanked" in given,
            )


def _parse_json(text: str, url: str) -> Iterator[Link]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"cannot read the index `{url}`: {error}"
        raise FetchError(message, hint="name a simple index (PEP 503 or 691)") from error
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
                str(hashes.get("sha256", "")) if isinstance(hashes, dict) else "",
                str(file.get("requires-python") or ""),
                size if isinstance(size, int) and size > 0 else None,
                bool(file.get("yanked")),
            )


def _objects(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = data.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _join(base: str, target: str) -> str:
    """Return the address that a link means, empty if it means none."""
    try:
        return urljoin(base, target)
    except ValueError:  # such as `http://[`
        return ""

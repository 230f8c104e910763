"""Lists the wheels, and the packages of channels such as conda, in a folder, index or page."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin, urlsplit

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import compatible_tags, cpython_tags, sys_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from ..builds.metadata import PYTHON
from ..builds.published import published_sets
from ..errors import FetchError
from ..product import SCRIPT
from .channels import READERS, parse_package
from .credentials import without_credentials
from .fetch import content_length, is_page, is_url, last_part, local_path, open_url, read_page
from .pages import MAX_LINKS, Link, parse_page
from .patience import Patience

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from packaging.tags import Tag

    from .channels import Package

PROJECT: Final = SCRIPT
MAX_PAGES: Final = 40
MAX_ENTRIES: Final = 100_000
MAX_TAGS: Final = 1000  # maximum number of tags of one wheel; wheels on PyPI have up to 60

_LINUX: Final = ("any", "linux", "manylinux")  # prefixes of platform tags for Linux
_RELEASE: Final = re.compile(r"3\.[0-9]{1,3}(\.[0-9]{1,3})?")
_FOLDERS = ("simple", "wheels", "dist")  # subfolders of a page that may hold an index


@dataclass(frozen=True)
class IndexedWheel:
    """A wheel on a page or in a folder, described by its name and link."""

    file_name: str
    location: str  # path or address
    project: str  # as spelled in indexes: "my-kernels"
    version: Version
    tags: frozenset[Tag]
    size: int | None = None  # bytes; None: unknown
    digest: str = ""  # such as `sha256=<hex>`; empty if unknown
    requires_python: str = ""  # such as `>=3.10`; empty if unknown
    index: str = ""  # the value for `pip --index-url`; empty if there is none

    @property
    def is_local(self) -> bool:
        """Tell if the wheel is a local file."""
        return not is_url(self.location)

    @property
    def label(self) -> str:
        """The arch set in the version: `hopper` of `0.1.0+cu130.hopper`."""
        return (self.version.local or "").partition(".")[2]

    @property
    def toolkit(self) -> str:
        """The toolkit in the version: `13.0` of `0.1.0+cu130.hopper`."""
        match = re.fullmatch(r"cu([0-9]+)([0-9])", (self.version.local or "").partition(".")[0])
        return f"{match[1]}.{match[2]}" if match else ""

    @property
    def sha256(self) -> str:
        """The SHA-256 that the page states for the wheel; empty if there is none."""
        method, _, value = self.digest.partition("=")
        return value if method == "sha256" else ""

    def runs_on(self, machine: str) -> bool:
        """Tell if the tags allow CPUs of a kind, such as `aarch64`."""
        return any(tag.platform.endswith(("any", f"_{machine}")) for tag in self.tags)

    def fits(self, python: str, *, here: bool = True) -> bool:
        """Tell if a Python can install the wheel.

        If an index does not state Requires-Python, that of this toolkit's own wheels is assumed.

        Args:
            python: Version of the Python; empty for any.
            here: True for the running Python on this system. False for a Python on another Linux
                with glibc; `runs_on` compares its CPU.
        """
        match = _RELEASE.match(python)  # `3.15.0a1+` is not a valid version for a specifier
        release = match[0] if match else ""
        try:
            required = SpecifierSet(self.requires_python or PYTHON)
            wanted = not release or required.contains(release)
        except InvalidSpecifier:
            wanted = True
        if here:
            return wanted and not self.tags.isdisjoint(sys_tags())
        meant = [tag for tag in self.tags if tag.platform.startswith(_LINUX)]
        kinds = {(tag.interpreter, tag.abi) for tag in meant}
        return wanted and (not release or not _kinds(release).isdisjoint(kinds))

    def to_json(self) -> dict[str, Any]:
        """Return the wheel as plain data."""
        return {
            "file_name": self.file_name,
            "location": self.location,
            "version": str(self.version),
            "size": self.size,
            "sha256": self.sha256 or None,
            "index": self.index or None,
        }


@cache
def _kinds(python: str) -> frozenset[tuple[str, str]]:
    """Return the interpreter and ABI of all tags that a CPython of this version supports."""
    version = Version(python).release[:2]
    tags = (
        *cpython_tags(version, platforms=["any"]),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms=["any"]),
    )
    return frozenset((tag.interpreter, tag.abi) for tag in tags)


@dataclass(frozen=True)
class Index:
    """The wheels, and packages such as conda's, that a folder, index or page offers."""

    place: str
    wheels: tuple[IndexedWheel, ...]
    packages: tuple[Package, ...] = ()


def read_index(place: str, project: str | None = PROJECT) -> Index:
    """Read a folder or an index.

    Args:
        place: Folder, page in a file, address of an index, or address of a page of an index.
        project: The wheels' project; None for all wheels in the folder or on the page.

    Raises:
        FetchError: The place does not exist, or cannot be read.
    """
    place = without_credentials(place) if is_url(place) else place
    path = local_path(place) if is_url(place) else Path(place)
    if path is None:
        links = [*_crawl(place, project)]
        return _collect(place, links, project)
    try:
        if path.is_dir():
            return _collect(place, [*_walk(path)], project)
        base = path.resolve().as_uri()  # raises ValueError for a name with a NUL
        links = [(link, "") for link in parse_page(path.read_text("utf-8", "replace"), base)]
    except (OSError, ValueError) as error:
        if isinstance(error, FetchError):
            raise
        message = f"cannot read the index `{place}`: {getattr(error, 'strerror', None) or error}"
        raise FetchError(message, hint="name a folder of wheels, or a simple index") from error
    return _collect(place, links, project)


def make_index(place: str, page: str, url: str) -> Index:
    """Return the index of a page that is already fetched, with wheels of all projects."""
    links = [(link, url) for link in parse_page(page, url)]
    return _collect(place, links, None)


def _walk(folder: Path) -> Iterator[tuple[Link, str]]:
    """Yield links to the wheels and packages of a folder tree; do not enter linked folders."""
    seen = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            seen += 1
            if seen > MAX_ENTRIES:
                message = f"`{folder}` holds more than {MAX_ENTRIES} files"
                raise FetchError(message, hint="name the folder that the wheels are in")
            path = Path(place, name)
            if path.suffix in {".whl", *READERS} and path.is_file():
                yield Link(path.absolute().as_uri(), size=path.stat().st_size), ""


def _crawl(url: str, project: str | None) -> Iterator[tuple[Link, str]]:
    """Yield the links of a page, each with the address of its page.

    If a project is given, also crawl the pages below that may have its wheels.
    """
    waiting, seen, found = [url], {url}, 0
    patience = Patience()
    while waiting and len(seen) <= MAX_PAGES:
        with open_url(waiting.pop(0), patience=patience) as response:
            if not is_page(response):
                message = f"`{response.url}` is no page of an index"
                raise FetchError(message, hint="name a simple index (PEP 503 or 691) or a folder")
            links = parse_page(read_page(response), response.url)
            here = response.url
        found += len(links)
        if found > MAX_LINKS:
            message = f"the pages of `{url}` have more than {MAX_LINKS} links"
            raise FetchError(message, hint="name the page of the project")
        yield from ((link, here) for link in links)
        below = [link.url for link in links if project and _leads_to(link, here, project)]
        waiting.extend(one for one in below if one not in seen)
        seen.update(below)


def _leads_to(link: Link, page: str, project: str) -> bool:
    """Tell if a link leads to a folder below the page that may hold the project's wheels."""
    folder = _folder(page)
    if not link.url.endswith("/") or len(link.url) <= len(folder):
        return False
    sets = (name for archset in published_sets() for name in (archset.name, archset.label))
    name = canonicalize_name(link.file_name)
    return link.url.startswith(folder) and name in {project, *_FOLDERS, *sets}


def _folder(page: str) -> str:
    """Return the address of a page's folder, with a final `/`; a name without `.` is a folder."""
    if page.endswith("/"):
        return page
    return urljoin(page, ".") if "." in PurePosixPath(urlsplit(page).path).name else f"{page}/"


def _collect(place: str, links: Iterable[tuple[Link, str]], project: str | None) -> Index:
    wheels: dict[str, IndexedWheel] = {}
    packages: dict[str, Package] = {}
    for link, page in links:
        package = parse_package(link)
        if package is not None and (project is None or canonicalize_name(package.name) == project):
            packages.setdefault(link.file_name, package)
        wheel = None if link.yanked else parse_wheel(link, page)
        if wheel is None or (project is not None and wheel.project != project):
            continue
        known = wheels.get(wheel.file_name)
        if known is None or (wheel.index and not known.index):
            wheels[wheel.file_name] = wheel
    return Index(place, tuple(wheels.values()), tuple(packages.values()))


def parse_wheel(link: Link, page: str = "") -> IndexedWheel | None:
    """Parse the name of a wheel; None if installers would reject the name.

    Args:
        link: The link to the file.
        page: The page with the link; empty in a folder. A page `.../my-kernels/` belongs to an
            index.
    """
    name = link.file_name
    if not name.endswith(".whl"):
        return None
    try:
        _refuse_tags(name)
        project, version, _, tags = parse_wheel_filename(name)
        path = local_path(link.url)
    except (FetchError, ValueError):  # InvalidWheelFilename, or a number with thousands of digits
        return None
    is_of_index = page and canonicalize_name(last_part(_folder(page))) == project
    return IndexedWheel(
        name,
        link.url if path is None else str(path),
        project,
        version,
        tags,
        link.size,
        link.digest,
        link.requires_python,
        urljoin(_folder(page), "..") if is_of_index else "",
    )


def _refuse_tags(name: str) -> None:
    """Raise InvalidWheelFilename for too many tags: every combination of parts is a tag."""
    sets = name.removesuffix(".whl").rsplit("-", 3)[1:]
    if math.prod(one.count(".") + 1 for one in sets) > MAX_TAGS:
        message = f"Invalid wheel filename (more than {MAX_TAGS} tags): {name[:80]!r}"
        raise InvalidWheelFilename(message)


def ask_size(wheel: IndexedWheel, patience: Patience | None = None) -> IndexedWheel:
    """Return a wheel with its size. Ask the server if the page omits it; the size may stay None."""
    if wheel.size is not None or wheel.is_local:
        return wheel
    try:
        with open_url(wheel.location, method="HEAD", patience=patience) as response:
            return replace(wheel, size=content_length(response))
    except FetchError:
        return wheel

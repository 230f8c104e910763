"""The headers of torch's stable ABI: about 60 files, 0.5 MB of the 527 MB of a torch wheel.

`torch_headers.toml` pins the torch version and the SHA-256 of every header. The headers come from a
local wheel in the folders of find-links, else by range requests from the wheel on the package
index. TORCH_ROOT is used directly, and so is an installed torch if there is no index. Without any
of these, a build requires torch from its frontend: pip may have it in a folder that only pip knows.

    python -m PACKAGE.toolkit.make.toolchain.torch_headers                   fetch the headers
    python -m PACKAGE.toolkit.make.toolchain.torch_headers --lock VERSION    pin the headers
"""

from __future__ import annotations

import argparse
import hashlib
import html
import os
import posixpath
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...errors import KernelsError
from ...targets.wording import format_size
from ..command import command
from ..project import NATIVE, ROOT, load_project
from .client_settings import find_links, find_offline, find_own_torch, find_torch, index_url

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LOCK = Path(__file__).resolve().with_name("torch_headers.toml")
FOLDER = "torch-headers"  # in the build folder
PREFIX = "torch/include/"
# Bindings on the stable ABI may include the headers in these folders.
STABLE = tuple(
    f"{PREFIX}torch/{folder}/"
    for folder in ("csrc/stable", "headeronly", "csrc/inductor/aoti_torch/c")
)

_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


class TorchHeadersError(KernelsError):
    """The torch headers are not available."""


@dataclass(frozen=True)
class Lock:
    """The pinned torch version and the digests of its headers."""

    version: str
    sha256: dict[str, str]

    @classmethod
    def load(cls, path: Path = LOCK) -> Lock:
        """Read the version and the hashes from the lock."""
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(data["version"], data["sha256"])

    def __str__(self) -> str:
        lines = [
            "# Written by `nox -s lock_headers`: the headers that the binding reaches.",
            f'version = "{self.version}"',
            "",
            "[sha256]",
            *(f'"{name}" = "{digest}"' for name, digest in sorted(self.sha256.items())),
        ]
        return "\n".join([*lines, ""])

    def holds(self, folder: Path) -> bool:
        """Tell if this folder has every pinned header, unchanged."""
        return all(
            (folder / name).is_file() and _sha256((folder / name).read_bytes()) == digest
            for name, digest in self.sha256.items()
        )


@dataclass(frozen=True)
class TorchHeaders:
    """An include folder and its origin."""

    include: Path
    version: str
    origin: str

    def __str__(self) -> str:
        return f"torch headers: {self.version}, {self.origin}"


class Archive(Protocol):
    """The methods of zipfile.ZipFile that this module uses; remotezip.RemoteZip has them, too."""

    def namelist(self) -> list[str]:
        """List the names of the archive's members."""

    def read(self, name: str) -> bytes:
        """Return the content of a member."""


def find_headers(cache: Path, lock: Lock | None = None) -> TorchHeaders:
    """Return headers of TORCH_ROOT, else of the cache, a wheel, the index or an installed torch."""
    lock = lock or _checked_lock()
    named = os.environ.get("TORCH_ROOT", "").strip()
    if named:
        return _from_folder(Path(named), "named by TORCH_ROOT")
    include = _cached(cache, lock)
    if lock.holds(include):
        return TorchHeaders(include, lock.version, "cached")
    wheel = find_local_wheel(lock.version)
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            extract(archive, lock, include)
        return TorchHeaders(include, lock.version, f"from {wheel.name}")
    try:
        size = fetch_remote(lock, include)
    except (OSError, urllib.error.URLError, TorchHeadersError) as error:
        return _from_installed(error)
    return TorchHeaders(include, lock.version, f"{format_size(size)} by range requests")


def list_needed(cache: Path, lock: Lock | None = None) -> list[str]:
    """Return torch as a requirement, or an empty list if its headers are found elsewhere."""
    lock = lock or Lock.load()
    named = os.environ.get("TORCH_ROOT", "").strip()
    if named or lock.holds(_cached(cache, lock)) or find_local_wheel(lock.version):
        return []
    try:
        wheel_url(lock.version)
    except (OSError, TorchHeadersError) as error:
        if find_own_torch() or find_torch():
            return []
        print(f"torch headers: those of a whole torch, as no index has them: {error}", flush=True)
        return [f"torch>={load_project().torch_min}"]
    return []


def _cached(cache: Path, lock: Lock) -> Path:
    return cache / f"torch-{lock.version}"


def _checked_lock() -> Lock:
    """Load the lock, and check that it covers the current binding."""
    lock = Lock.load()
    missing = own_includes(_read_binding()) - lock.sha256.keys()
    if missing:
        message = f"the binding includes {', '.join(sorted(missing))}, not pinned in {LOCK.name}"
        raise TorchHeadersError(message, hint="`nox -s lock_headers` pins it")
    return lock


def _read_binding() -> str:
    """Return the text of all files that may include torch headers."""
    project = load_project()
    files = {*project.binding, *(one.path for one in project.plain)}
    folders = {NATIVE / "binding", *(path.parent for path in project.binding)}
    files |= {path for folder in folders for path in folder.iterdir() if path.is_file()}
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(files))
    return "".join(texts)


def extract(archive: Archive, lock: Lock, include: Path) -> int:
    """Copy the pinned headers from a wheel, check them, and return their size in bytes."""
    total = 0
    for name, digest in lock.sha256.items():
        data = archive.read(PREFIX + name)
        if _sha256(data) != digest:
            message = f"{name} of torch {lock.version} is not the pinned file"
            raise TorchHeadersError(message, hint="`nox -s lock_headers` pins again")
        target = include / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        total += len(data)
    return total


def fetch_remote(lock: Lock, include: Path) -> int:
    """Extract the headers from the wheel on the package index without downloading all of it."""
    from remotezip import RemoteZip, RemoteZipError  # noqa: PLC0415  (only this path needs it)

    try:
        with RemoteZip(wheel_url(lock.version)) as archive:
            return extract(archive, lock, include)
    except RemoteZipError as error:
        raise TorchHeadersError(str(error)) from error


def wheel_url(version: str) -> str:
    """Return the address of a Linux x86_64 wheel of torch on the package index."""
    offline = find_offline()
    if offline:
        message = f"{offline} forbids it"
        raise TorchHeadersError(message)
    index = f"{index_url()}/torch/"
    request = urllib.request.Request(index, headers={"Accept": "text/html"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        page, base = str(answer.read(), "utf-8"), str(answer.url)
    pattern = rf'href="([^"]*torch-{re.escape(version)}-cp[^"]*manylinux[^"]*x86_64\.whl[^"]*)"'
    found = re.search(pattern, page)
    if found is None:
        message = f"{index} lists no Linux wheel of torch {version}"
        raise TorchHeadersError(message, hint="set TORCH_ROOT to the folder of an installed torch")
    return urllib.parse.urljoin(base, html.unescape(found[1])).partition("#")[0]


def find_local_wheel(version: str) -> Path | None:
    """Return a torch wheel in the folders of pip's find-links; None if there is none."""
    folders = [Path(link.removeprefix("file://")) for link in find_links()]
    for folder in folders:
        wheels = sorted(folder.glob(f"torch-{version}[-+]*.whl")) if folder.is_dir() else []
        if wheels:
            return wheels[0]
    return None


def _from_folder(root: Path, origin: str) -> TorchHeaders:
    """Return the headers in the folder of a torch package, or in an include folder."""
    folders = (root / "include", root)
    include = next((one for one in folders if (one / "torch/csrc/stable").is_dir()), None)
    if include is None:
        message = f"`{root}` ({origin}) has no include/torch/csrc/stable"
        raise TorchHeadersError(message, hint="name the folder that holds torch's __init__.py")
    version = root / "version.py"
    text = version.read_text(encoding="utf-8") if version.is_file() else ""
    found = re.search(r"__version__ = '([^']+)'", text)
    return TorchHeaders(include.resolve(), found[1] if found else "unknown", origin)


def _from_installed(error: Exception) -> TorchHeaders:
    """Return the headers of an installed torch, without importing it: the last resort."""
    found = find_own_torch() or find_torch()
    if found is None:
        message = f"the torch headers cannot be fetched from {index_url()}: {error}"
        hint = "set TORCH_ROOT to the folder of an installed torch, or PIP_FIND_LINKS to its wheel"
        raise TorchHeadersError(message, hint=hint) from error
    version, folder = found
    headers = _from_folder(folder, "of the installed torch")
    return TorchHeaders(headers.include, version, headers.origin)


def closure(roots: Iterable[str], read: Callable[[str], str | None]) -> list[str]:
    """Return the headers that #include lines reach from `roots`, even lines below `#if 0`.

    `read` returns the text of a header, or None to leave it out.
    """
    todo, found = list(roots), set()
    while todo:
        name = todo.pop()
        text = None if name in found else read(name)
        if text is None:
            continue
        found.add(name)
        folder = posixpath.dirname(name)
        for included in _INCLUDE.findall(text):
            todo += [included, posixpath.normpath(posixpath.join(folder, included))]
    return sorted(found)


def own_includes(text: str) -> set[str]:
    """Return the torch headers that a source file includes directly."""
    return {name for name in _INCLUDE.findall(text) if name.startswith("torch/")}


def write_lock(version: str) -> Lock:
    """Pin the headers of the stable ABI, and all that they or the binding include."""
    from remotezip import RemoteZip  # noqa: PLC0415  (only this path needs it)

    wheel = find_local_wheel(version)
    opened = zipfile.ZipFile(wheel) if wheel else RemoteZip(wheel_url(version))
    contents: dict[str, bytes] = {}
    with opened as archive:
        members = {name for name in archive.namelist() if not name.endswith("/")}

        def read(name: str) -> str | None:
            if PREFIX + name not in members:
                return None
            contents[name] = archive.read(PREFIX + name)
            return contents[name].decode()

        stable = (name.removeprefix(PREFIX) for name in members if name.startswith(STABLE))
        names = closure([*_INCLUDE.findall(_read_binding()), *stable], read)
    lock = Lock(version, {name: _sha256(contents[name]) for name in names})
    LOCK.write_text(str(lock), encoding="utf-8")
    return lock


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@command
def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="Fetch or pin the torch headers of the binding.")
    parser.add_argument("--lock", metavar="VERSION", help="pin the headers of this torch")
    args = parser.parse_args()
    if args.lock:
        lock = write_lock(args.lock)
        print(f"pinned {len(lock.sha256)} headers of torch {lock.version}")
    else:
        print(find_headers(ROOT / "build" / FOLDER))
    return 0


if __name__ == "__main__":
    sys.exit(main())

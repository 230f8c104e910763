"""Compares the files of this package with pip's record: damage, copies, leftovers.

The record is the RECORD of the wheel (Binary distribution format, packaging.python.org): a SHA-256
and a size for each file.
"""

from __future__ import annotations

import base64
import csv
import os
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from ..binaries.files import hash_file
from ..builds.package import FOUND, PACKAGE
from ..product import KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_INTERRUPTED = "~"  # prefix of names while pip removes a package


@dataclass(frozen=True)
class InstallFiles:
    """State of the installed files; names are relative to `folder`."""

    status: Literal["recorded", "unrecorded"] = "unrecorded"
    folder: str = ""  # folder that contains the package
    count: int = 0  # files that were compared
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # files that this user cannot read
    leftovers: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()  # other folders in which Python would find this package
    in_sources: bool = False  # Python runs the sources in the folder where it was started

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "status": self.status,
            "folder": self.folder,
            "files": self.count,
            "missing": list(self.missing),
            "changed": list(self.changed),
            "unreadable": list(self.unreadable),
            "leftovers": list(self.leftovers),
            "copies": list(self.copies),
        }


def read_install_files(
    package: Path = FOUND, search_path: Iterable[str] | None = None
) -> InstallFiles:
    """Compare the package's files with the record next to it, and find copies of the package.

    Args:
        package: The folder of the running package, with links unresolved: uv, pex, Nix and Spack
            install links, and pip's record is next to the links.
        search_path: Folders in which Python looks for packages; sys.path when None.
    """
    folder = package.absolute().parent
    places = list(dict.fromkeys(sys.path if search_path is None else search_path))
    copies = tuple(sorted(_find_copies(package, places)))
    in_sources = bool(places) and _is_source_tree(folder, Path(places[0] or "."))
    record, listed = _find_record(package.name, folder)
    if not listed:
        found = InstallFiles(folder=str(folder), copies=copies, in_sources=in_sources)
        if record is None:
            return found
        name = (record.relative_to(folder).as_posix(),)
        readable = os.access(record, os.R_OK)
        return replace(found, changed=name) if readable else replace(found, unreadable=name)
    # Ignore caches, and scripts outside of the folder: `pip install --target` and copies of the
    # folder leave these scripts elsewhere.
    known = {str(one): one for one in listed if ".." not in one.parts and not _is_cache(one)}
    judged = {name: _judge(folder, file) for name, file in known.items()}
    missing, changed, unreadable = (
        tuple(sorted(name for name, one in judged.items() if one == state))
        for state in ("missing", "changed", "unreadable")
    )
    leftovers = tuple(sorted(_find_leftovers(package, known)))
    states = missing, changed, unreadable, leftovers
    return InstallFiles("recorded", str(folder), len(known), *states, copies)


def _find_record(
    name: str, folder: Path
) -> tuple[Path | None, Sequence[metadata.PackagePath] | None]:
    """Find the RECORD of an installed wheel. A build in the sources leaves no RECORD.

    Returns:
        The file, or None if there is none; and the files that it lists, or None if unreadable.
    """
    record = next(iter(sorted(folder.glob(f"{name}-*.dist-info/RECORD"))), None)
    if record is None:
        return None, None
    try:
        return record, metadata.Distribution.at(record.parent).files
    except (ValueError, TypeError, csv.Error):  # not text, or malformed lines
        return record, None


def _find_copies(package: Path, places: Iterable[str]) -> Iterator[str]:
    """Yield the folders with another package of this name, except links to the same files."""
    known = {(package / "__init__.py").resolve()}
    for place in places:
        file = Path(place or ".").absolute() / package.name / "__init__.py"
        if file.is_file() and (real := file.resolve()) not in known:
            known.add(real)
            yield str(file.parents[1])


def _is_source_tree(folder: Path, first: Path) -> bool:
    """Tell if a folder holds sources and is first on Python's path, as if Python started there.

    `python -m` puts its working folder before all installed packages. Sources are recognised by
    csrc/kernels.toml next to the package, or by the absence of built kernels in it.
    """
    if first.resolve() != folder.resolve():
        return False
    package = folder / PACKAGE.name
    unbuilt = package.is_dir() and not (package / KERNELS).exists()
    return unbuilt or (folder / "csrc" / "kernels.toml").is_file()


def _is_cache(path: PurePath) -> bool:
    return "__pycache__" in path.parts


def _judge(
    folder: Path, file: metadata.PackagePath
) -> Literal["sound", "missing", "changed", "unreadable"]:
    """Compare a file with the size and hash in the record, as far as the record states them."""
    path = folder / str(file)
    try:
        size = path.stat().st_size
        same = file.size in {None, size} and (
            file.hash is None or _hash(path, file.hash.mode) == file.hash.value
        )
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except PermissionError:
        return "unreadable"
    except (OSError, ValueError):  # a folder, or a hash algorithm that is unknown to this Python
        return "changed"
    return "sound" if same else "changed"


def _hash(path: Path, mode: str) -> str:
    with path.open("rb") as file:
        return base64.urlsafe_b64encode(hash_file(file, mode)).rstrip(b"=").decode()


def _find_leftovers(package: Path, known: Iterable[str]) -> Iterator[str]:
    """Yield package files that the record does not list, and remains of an interrupted pip run."""
    recorded = set(known)
    folder = package.parent
    for path in package.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in recorded and not _is_cache(path):
            yield name
    remains = _INTERRUPTED + package.name[1:]
    yield from (path.name for path in folder.glob(f"{remains}*"))
